"""Losses of distillation, one value a sample or token: temperature KL, top-k logits, features of other widths."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from samestep.errors import SamestepError, StepError

By = Literal["mse", "cosine"]
_HALF = (torch.float16, torch.bfloat16)
_ROUNDING = 8  # a rest below this many units in the last place of 1 is what rounding left, not a share


class TopK(NamedTuple):
    """The largest logits of each place, and what the rest adds up to: enough for a KL, in a fraction of the bytes."""

    values: Tensor
    """The k largest logits, (..., k), as the teacher gave them."""
    indices: Tensor
    """Which classes they are of, int64 of the same shape."""
    logsumexp: Tensor
    """log(sum(exp(logits / temperature))) over all classes, (...), in fp32 at least."""
    temperature: float
    """The only temperature at which this sum can be used."""


def top_k(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The `k` largest of `logits`, (rows, ..., classes), for a `distill_loss` of this temperature.

    >>> few = top_k(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2)
    >>> few.values, few.indices
    (tensor([[3., 2.]]), tensor([[0, 2]]))
    """
    _check_logits("top_k", "logits", logits)
    _check_temperature("top_k", temperature)
    most = logits.shape[-1]
    if not isinstance(k, Integral) or not 1 <= k <= most:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise SamestepError(f"top_k was to keep {k!r} of {most} classes: give k from 1 to {most}")
    values, indices = logits.topk(k, dim=-1)
    return TopK(values, indices, (_exact(logits) / temperature).logsumexp(dim=-1), float(temperature))


def distill_loss(
    student_logits: Tensor, teacher_logits: Tensor | TopK, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """KL(teacher || student) at `temperature`, times its square: one loss a place, for `step.mean(losses, mask)`.

    Logits of shape (rows, classes) give losses (rows,), those of (rows, tokens, classes) give (rows, tokens). The
    square keeps gradients as large as at temperature 1, so that a sum with another loss keeps its balance. Only the
    student gets a gradient. Computed in fp32 at least; classes at -inf on both sides count for nothing.

    Against `TopK` the classes that were left out count as one: never more than the whole KL, equal to it where all
    classes are kept, and zero only where the student agrees on what was kept.

    `mask` says which places count. Others give zero, and a zero gradient whatever stands there; hand it to
    `step.mean` as well, which divides by the count.

    >>> losses = distill_loss(torch.zeros(4, 10), torch.randn(4, 10), temperature=2.0)
    >>> losses.shape
    torch.Size([4])
    """
    _check_logits("distill_loss", "the student's logits", student_logits)
    _check_temperature("distill_loss", temperature)
    if isinstance(teacher_logits, TopK):
        _check_top_k(student_logits, teacher_logits, temperature)
    else:
        _check_logits("distill_loss", "the teacher's logits", teacher_logits)
        if student_logits.shape != teacher_logits.shape:
            raise StepError(
                f"distill_loss got logits of shape {tuple(student_logits.shape)} from the student and "
                f"{tuple(teacher_logits.shape)} from the teacher: both must be (rows, ..., classes) for the same "
                "samples and the same classes"
            )
    if mask is not None:
        _check_mask(mask, student_logits)
        student_logits, teacher_logits = _still(student_logits, mask), _still_teacher(teacher_logits, mask)
    student = (_exact(student_logits) / temperature).log_softmax(dim=-1)
    if isinstance(teacher_logits, TopK):
        losses = _few_against_all(student, teacher_logits)
    else:
        teacher = (_exact(teacher_logits.detach()) / temperature).log_softmax(dim=-1)
        losses = _divergence(teacher, student).sum(dim=-1)
    losses = losses * temperature**2
    return losses if mask is None else torch.where(mask.bool(), losses, losses.new_zeros(()))


class Projection(nn.Linear):
    """A trainable map from the student's width to the teacher's, made of two numbers alike on every rank.

    Wrap it, with the student or by itself: `projection = run.wrap(Projection(384, 1024))`. The widths come from
    configurations: ranks that hold no teacher must build it too, or their gradients have nothing to meet.

    >>> Projection(8, 32)(torch.zeros(4, 8)).shape
    torch.Size([4, 32])
    """

    def __init__(self, student_width: int, teacher_width: int) -> None:
        for name, width in (("student_width", student_width), ("teacher_width", teacher_width)):
            if not isinstance(width, int) or width < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
                kind = type(width).__name__
                told = f"{width}" if isinstance(width, int) else f"a {kind}"  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SamestepError(
                    f"Projection got {name}={told}: give the width as a whole number from the configuration, such as "
                    "Projection(384, 1024), never from a live teacher, which not every rank holds"
                )
        super().__init__(student_width, teacher_width)


def match_features(
    student: Tensor,
    teacher: Tensor,
    projection: nn.Module | None = None,
    by: By = "mse",
    mask: Tensor | None = None,
) -> Tensor:
    """How far features are apart along their last dimension: one loss a place, for `step.mean(losses, mask)`.

    `by="mse"` is the mean of the squared differences, `by="cosine"` one minus the cosine of the angle. `projection`
    brings the student's features to the teacher's width first. `mask` as in `distill_loss`.

    >>> student, teacher = torch.randn(4, 7, 8), torch.randn(4, 7, 32)
    >>> match_features(student, teacher, Projection(8, 32)).shape
    torch.Size([4, 7])
    """
    if by not in get_args(By):
        choices = ", ".join(map(repr, get_args(By)))
        raise SamestepError(f"match_features does not know by={by!r}: use one of {choices}")
    _check_tensor("match_features", "the student's features", student)
    _check_tensor("match_features", "the teacher's features", teacher)
    if mask is not None:
        _check_mask(mask, student)
        student = _still(student, mask)
    projected = student if projection is None else projection(student)
    if projected.dim() < 2 or projected.shape != teacher.shape:
        raise StepError(
            f"match_features got features of shape {tuple(projected.shape)} from the student and "
            f"{tuple(teacher.shape)} from the teacher: both must be (rows, ..., width) for the same samples; other "
            "widths need projection=Projection(student_width, teacher_width)"
        )
    ours, theirs = _exact(projected), _exact(teacher.detach() if mask is None else _still(teacher.detach(), mask))
    losses = (ours - theirs).square().mean(dim=-1) if by == "mse" else 1 - cosine_similarity(ours, theirs, dim=-1)
    return losses if mask is None else torch.where(mask.bool(), losses, losses.new_zeros(()))


def similarity_correlation(student: Tensor, teacher: Tensor) -> float:
    """Pearson's r of all similarities between rows: does the student find the same rows alike as the teacher?

    Of vectors (rows, width) of all ranks, which may be of different widths; a similarity is a cosine, every pair of
    rows counts once. It is no mean of ranks: bring the rows together first, with `run.all_reduce(made, "sum")`.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(similarity_correlation(vectors, 2 * vectors), 6)
    1.0
    """
    if student.dim() != 2 or teacher.dim() != 2 or len(student) != len(teacher) or len(student) < 3:
        raise SamestepError(
            f"similarity_correlation got vectors of shape {tuple(student.shape)} from the student and "
            f"{tuple(teacher.shape)} from the teacher: both must be (rows, width), with at least 3 of the same rows"
        )
    pairs = torch.triu_indices(len(student), len(student), 1)
    unit = [normalize(vectors.double(), dim=-1) for vectors in (student, teacher)]
    alike = torch.stack([(vectors @ vectors.mT)[*pairs] for vectors in unit])
    return torch.corrcoef(alike)[0, 1].item()


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The terms p * (log p - log q), zero where p is: -inf on both sides would give nan, also in the gradient."""
    there = teacher > -math.inf
    difference = torch.where(there, teacher, 0.0) - torch.where(there, student, 0.0)
    return teacher.exp() * difference


def _few_against_all(student: Tensor, few: TopK) -> Tensor:
    """The KL over the classes that were kept and one more for the rest; `student` is normalised over all."""
    indices = few.indices.long()
    whole = _exact(few.logsumexp.detach())[..., None]
    kept = _exact(few.values.detach()) / few.temperature - whole
    losses = _divergence(kept, student.gather(-1, indices)).sum(dim=-1)
    if indices.shape[-1] == student.shape[-1]:
        return losses
    share = -torch.expm1(kept.logsumexp(dim=-1))
    share = torch.where(share > _ROUNDING * torch.finfo(share.dtype).eps, share, 0.0)
    # The student's rest is added up from what was left out: 1 - sum(kept) has no digits left where it is small. Where
    # the teacher has no rest, the student may have none either, and the sum of nothing has no gradient.
    left = torch.where(share[..., None] > 0, student.scatter(-1, indices, -math.inf), 0.0)
    return losses + _divergence(share.log(), left.logsumexp(dim=-1))


def _exact(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _still(values: Tensor, mask: Tensor) -> Tensor:
    """Zeros at masked places: an inf or nan there, on either side, would reach the gradient through a loss of zero."""
    return torch.where(mask.bool()[..., None], values, values.new_zeros(()))


def _still_teacher(teacher: Tensor | TopK, mask: Tensor) -> Tensor | TopK:
    if not isinstance(teacher, TopK):
        return _still(teacher, mask)
    whole = torch.where(mask.bool(), teacher.logsumexp, math.log(teacher.values.shape[-1] + 1))  # of zeros, and a rest
    return teacher._replace(values=_still(teacher.values, mask), logsumexp=whole)


def _check_mask(mask: Tensor, values: Tensor) -> None:
    if mask.shape != values.shape[:-1]:
        raise StepError(
            f"the mask has shape {tuple(mask.shape)} and the losses will have {tuple(values.shape[:-1])}: give one "
            "value a place"
        )


def _check_tensor(function: str, what: str, given: object) -> None:
    """Refuse what a model gave as a whole, where one tensor of it is meant."""
    if isinstance(given, Tensor):
        return
    kind, name = type(given).__name__, "logits" if "logits" in what else "last_hidden_state"
    inside = hasattr(given, name) or (isinstance(given, Mapping) and name in given)
    remedy = f"pass .{name} of it" if inside else f"pass the tensor of {what.rpartition(' ')[2]} alone"
    raise StepError(f"{function} got a {kind} for {what}: {remedy}")


def _check_logits(function: str, what: str, logits: Tensor) -> None:
    _check_tensor(function, what, logits)
    if logits.dim() < 2 or not logits.is_floating_point():
        found = "a scalar" if logits.dim() == 0 else f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise StepError(
            f"{function} got {found} for {what}: it needs floating point logits of shape (rows, ..., classes), before "
            "any softmax, loss or mean"
        )


def _check_temperature(function: str, temperature: float) -> None:
    if not isinstance(temperature, Real) or not (temperature > 0 and math.isfinite(temperature)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SamestepError(f"{function} got temperature={temperature!r}: give a number above 0, such as 2.0")


def _check_top_k(student: Tensor, few: TopK, temperature: float) -> None:
    if few.temperature != temperature:
        raise StepError(
            f"distill_loss has temperature={temperature} and its top-k logits were made at {few.temperature}, where "
            f"alone their log-sum-exp holds: make them with temperature={temperature}"
        )
    if few.values.shape[:-1] != student.shape[:-1] or few.values.shape[-1] > student.shape[-1]:
        raise StepError(
            f"distill_loss got logits of shape {tuple(student.shape)} from the student and the {few.values.shape[-1]} "
            f"largest of shape {tuple(few.values.shape)} from the teacher: all but the last dimension must be alike"
        )
