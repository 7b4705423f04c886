"""Distillation losses with one value per sample or token, and metrics that add up over batches and ranks."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cosine_similarity, normalize

from samestep.errors import SamestepError, StepError

By = Literal["mse", "cosine"]
_ROUNDING = 8  # probabilities below this many epsilons are rounding errors


class TopK(NamedTuple):
    """The largest logits of each position and the log-sum-exp of all: enough for a KL divergence, in fewer bytes."""

    values: Tensor
    """The k largest logits, (..., k), in the teacher's dtype."""
    indices: Tensor
    """Their classes, int64 of the same shape."""
    logsumexp: Tensor
    """log(sum(exp(logits / temperature))) over all classes, (...), in fp32 or fp64."""
    temperature: float
    """The temperature of `logsumexp`, which the loss must use too."""


def top_k(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The `k` largest of `logits`, (rows, ..., classes), for a `distill_loss` with this temperature.

    >>> largest = top_k(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2)
    >>> largest.values, largest.indices
    (tensor([[3., 2.]]), tensor([[0, 2]]))
    """
    _check_logits("top_k", "logits", logits)
    _check_temperature("top_k", temperature)
    classes = logits.shape[-1]
    if not isinstance(k, Integral) or not 1 <= k <= classes:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise SamestepError(f"top_k got k={k!r} for {classes} classes: pass k from 1 to {classes}")
    values, indices = logits.topk(k, dim=-1)
    return TopK(values, indices, (_at_least_fp32(logits) / temperature).logsumexp(dim=-1), float(temperature))


def distill_loss(
    student_logits: Tensor, teacher_logits: Tensor | TopK, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """KL(teacher || student) at `temperature`, times temperature squared, for `step.mean(losses, mask)`.

    Logits of shape (rows, classes) give losses (rows,), those of (rows, tokens, classes) give (rows, tokens). The
    square keeps gradients as large as at temperature 1, so that the balance with another loss does not change. Only the
    student gets a gradient. The loss is computed in fp32 or fp64. Classes at -inf in both logits are ignored.

    With `TopK`, all other classes count as one class: the loss is at most the full KL divergence, is equal to it if all
    classes are kept, and is zero only if the student agrees on those that are.

    Positions outside of `mask` have a loss and a gradient of zero, even if they contain inf or nan. Pass the mask to
    `step.mean` too, which divides by the number of positions.

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
        student_logits, teacher_logits = _masked(student_logits, mask), _masked_teacher(teacher_logits, mask)
    student = (_at_least_fp32(student_logits) / temperature).log_softmax(dim=-1)
    if isinstance(teacher_logits, TopK):
        losses = _top_k_divergence(student, teacher_logits)
    else:
        teacher = (_at_least_fp32(teacher_logits.detach()) / temperature).log_softmax(dim=-1)
        losses = _divergence(teacher, student).sum(dim=-1)
    losses = losses * temperature**2
    return losses if mask is None else torch.where(mask.bool(), losses, losses.new_zeros(()))


class Projection(nn.Linear):
    """A trainable linear map from the student's width to the teacher's.

    Wrap it, with the student or by itself: `projection = run.wrap(Projection(384, 1024))`. Take the widths from
    configurations: ranks without a teacher must build the same projection.

    >>> Projection(8, 32)(torch.zeros(4, 8)).shape
    torch.Size([4, 32])
    """

    def __init__(self, student_width: int, teacher_width: int) -> None:
        for name, width in (("student_width", student_width), ("teacher_width", teacher_width)):
            is_int = isinstance(width, int)  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
            if not is_int or width < 1:
                raise SamestepError(
                    f"Projection got {name}={width if is_int else f'a {type(width).__name__}'}: pass the width as an "
                    "integer from the configuration, such as Projection(384, 1024), not from a teacher, which not "
                    "every rank holds"
                )
        super().__init__(student_width, teacher_width)


def match_features(
    student: Tensor, teacher: Tensor, projection: nn.Module | None = None, by: By = "mse", mask: Tensor | None = None
) -> Tensor:
    """The distance between features along their last dimension, for `step.mean(losses, mask)`.

    `by="mse"` is the mean squared difference, `by="cosine"` is one minus the cosine similarity. `projection` maps the
    student's features to the teacher's width first. `mask` works as in `distill_loss`.

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
        student = _masked(student, mask)
    projected = student if projection is None else projection(student)
    if projected.dim() < 2 or projected.shape != teacher.shape:
        raise StepError(
            f"match_features got features of shape {tuple(projected.shape)} from the student and "
            f"{tuple(teacher.shape)} from the teacher: both must be (rows, ..., width) for the same samples; other "
            "widths need projection=Projection(student_width, teacher_width)"
        )
    target = teacher.detach() if mask is None else _masked(teacher.detach(), mask)
    ours, theirs = _at_least_fp32(projected), _at_least_fp32(target)
    losses = (ours - theirs).square().mean(dim=-1) if by == "mse" else 1 - cosine_similarity(ours, theirs, dim=-1)
    return losses if mask is None else torch.where(mask.bool(), losses, losses.new_zeros(()))


def similarity_correlation(student: Tensor, teacher: Tensor) -> float:
    """Pearson's r between the pairwise cosine similarities of the student's rows and of the teacher's rows.

    The vectors are (rows, width) and may differ in width; every pair of rows counts once. This is not a mean over
    ranks: collect the rows of all ranks first, with `run.all_reduce(vectors, "sum")`.

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
    unit_vectors = [normalize(vectors.double(), dim=-1) for vectors in (student, teacher)]
    similarities = torch.stack([(vectors @ vectors.mT)[*pairs] for vectors in unit_vectors])
    return torch.corrcoef(similarities)[0, 1].item()


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The summands p * (log p - log q), zero if p is: -inf on both sides would give nan, also in the gradient."""
    finite = teacher > -math.inf
    difference = torch.where(finite, teacher, 0.0) - torch.where(finite, student, 0.0)
    return teacher.exp() * difference


def _top_k_divergence(student: Tensor, teacher: TopK) -> Tensor:
    """The KL divergence over the top-k classes and one class for all others; `student` is normalized over all."""
    indices = teacher.indices.long()
    kept = _at_least_fp32(teacher.values.detach()) / teacher.temperature
    kept = kept - _at_least_fp32(teacher.logsumexp.detach())[..., None]
    losses = _divergence(kept, student.gather(-1, indices)).sum(dim=-1)
    if indices.shape[-1] == student.shape[-1]:
        return losses
    rest = -torch.expm1(kept.logsumexp(dim=-1))
    rest = torch.where(rest > _ROUNDING * torch.finfo(rest.dtype).eps, rest, 0.0)
    # Sum the student's other classes directly: 1 - sum(kept) loses all digits if it is small. If the teacher's rest is
    # zero, the student's can be zero too, and the log-sum-exp of -inf has no gradient.
    others = torch.where(rest[..., None] > 0, student.scatter(-1, indices, -math.inf), 0.0)
    return losses + _divergence(rest.log(), others.logsumexp(dim=-1))


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Zeros at masked positions: an inf or nan there would reach the gradient even through a loss of zero."""
    return torch.where(mask.bool()[..., None], values, values.new_zeros(()))


def _masked_teacher(teacher: Tensor | TopK, mask: Tensor) -> Tensor | TopK:
    if not isinstance(teacher, TopK):
        return _masked(teacher, mask)
    # the log-sum-exp of k zeros and of one class for the rest
    logsumexp = torch.where(mask.bool(), teacher.logsumexp, math.log(teacher.values.shape[-1] + 1))
    return teacher._replace(values=_masked(teacher.values, mask), logsumexp=logsumexp)


def _check_mask(mask: Tensor, values: Tensor) -> None:
    if mask.shape != values.shape[:-1]:
        raise StepError(
            f"the mask has shape {tuple(mask.shape)}, but the losses have shape {tuple(values.shape[:-1])}: pass one "
            "value per loss"
        )


def _check_tensor(function: str, what: str, value: object) -> None:
    """Reject a complete model output if only one of its tensors is needed."""
    if isinstance(value, Tensor):
        return
    kind, name = type(value).__name__, "logits" if "logits" in what else "last_hidden_state"
    inside = hasattr(value, name) or (isinstance(value, Mapping) and name in value)
    remedy = f"pass its .{name}" if inside else f"pass the tensor of {what.rpartition(' ')[2]} alone"
    raise StepError(f"{function} got a {kind} for {what}: {remedy}")


def _check_logits(function: str, what: str, logits: Tensor) -> None:
    _check_tensor(function, what, logits)
    if logits.dim() < 2 or not logits.is_floating_point():
        found = "a scalar" if logits.dim() == 0 else f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise StepError(
            f"{function} got {found} for {what}: pass floating point logits of shape (rows, ..., classes), before "
            "any softmax, loss or mean"
        )


def _check_temperature(function: str, temperature: float) -> None:
    if not isinstance(temperature, Real) or not (temperature > 0 and math.isfinite(temperature)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SamestepError(f"{function} got temperature={temperature!r}: pass a number above 0, such as 2.0")


def _check_top_k(student: Tensor, teacher: TopK, temperature: float) -> None:
    if teacher.temperature != temperature:
        raise StepError(
            f"distill_loss got temperature={temperature}, but the top-k logits were computed at temperature "
            f"{teacher.temperature}: compute them with temperature={temperature}"
        )
    if teacher.values.shape[:-1] != student.shape[:-1] or teacher.values.shape[-1] > student.shape[-1]:
        raise StepError(
            f"distill_loss got logits of shape {tuple(student.shape)} from the student and top-k logits of shape "
            f"{tuple(teacher.values.shape)} from the teacher: all dimensions but the last must be the same"
        )


def class_counts(labels: Tensor, predictions: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """True positives, predictions and labels per class: float64 of shape (3, classes).

    Add them up over batches, then over ranks with `run.all_reduce(counts, "sum")`. In training pass
    `weights=step.weights`, which are zero for padding.

    >>> class_counts(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    tensor([[1., 1.],
            [2., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    if labels.dim() != 1 or labels.shape != predictions.shape:
        raise SamestepError(
            f"class_counts got labels of shape {tuple(labels.shape)} and predictions of shape "
            f"{tuple(predictions.shape)}: pass one class per row for both, such as scores.argmax(-1)"
        )
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights
    counted = ((labels, weights * (labels == predictions)), (predictions, weights), (labels, weights))
    return torch.stack([torch.bincount(which, weight.double(), classes) for which, weight in counted])


def class_scores(counts: Tensor) -> dict[str, float]:
    """`accuracy` and `macro_f1` from the sum of `class_counts`; a class that never occurs has an F1 of 0.

    >>> class_scores(class_counts(torch.tensor([0, 1]), torch.tensor([0, 1]), classes=2))
    {'accuracy': 1.0, 'macro_f1': 1.0}
    """
    correct, predicted, actual = counts
    f1 = (2 * correct / (predicted + actual).clamp(min=1)).mean()
    return {"accuracy": float(correct.sum() / actual.sum()), "macro_f1": float(f1)}


def fixation_counts(fixations: Tensor, height: int, width: int) -> Tensor:
    """Fixations per pixel, (rows, height, width), from coordinates (rows, fixations, 2) of row and column.

    Coordinates of -1 are padding and are ignored.

    >>> fixation_counts(torch.tensor([[[0, 1], [0, 1], [-1, -1]]]), height=2, width=2)
    tensor([[[0., 2.],
             [0., 0.]]])
    """
    valid = fixations[..., 0] >= 0
    pixels = torch.where(valid, fixations[..., 0] * width + fixations[..., 1], height * width).long()
    counts = torch.zeros(len(pixels), height * width + 1, device=pixels.device)
    return counts.scatter_add_(1, pixels, torch.ones_like(pixels, dtype=counts.dtype))[:, :-1].view(-1, height, width)


def fixation_density(counts: Tensor, sigma: float) -> Tensor:
    """Blur fixations with a Gaussian of `sigma` pixels, to a density that sums to one per image."""
    if not sigma > 0:
        raise SamestepError(f"fixation_density got sigma={sigma}: pass the width of the Gaussian in pixels, above 0")
    radius = int(3 * sigma) + 1
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, device=counts.device) / sigma) ** 2)[None, None]
    blurred = conv2d(counts[:, None], kernel[..., None], padding=(radius, 0))
    blurred = conv2d(blurred, kernel[..., None, :], padding=(0, radius))
    return blurred[:, 0] / blurred.sum(dim=(1, 2, 3))[:, None, None]


def saliency_metrics(log_density: Tensor, counts: Tensor, sigma: float) -> dict[str, Tensor]:
    """NSS, AUC-Judd, CC and KL per image, (rows,), which `run.means` averages over the images of all ranks.

    `log_density` is the logarithm of the predicted density, which sums to one; `counts` comes from `fixation_counts`.
    CC and KL compare with `fixation_density(counts, sigma)`.
    """
    if log_density.dim() != 3 or log_density.shape != counts.shape:
        raise SamestepError(
            f"saliency_metrics got a density of shape {tuple(log_density.shape)} and fixations of shape "
            f"{tuple(counts.shape)}: both must be (rows, height, width) for the same images"
        )
    density, truth = log_density.exp(), fixation_density(counts, sigma)
    predicted_scores, true_scores = _standardize(density), _standardize(truth)
    return {
        "nss": (predicted_scores * counts).sum((1, 2)) / counts.sum((1, 2)),
        "auc_judd": torch.stack([_auc_judd(image, seen) for image, seen in zip(density, counts > 0, strict=True)]),
        "cc": (predicted_scores * true_scores).mean((1, 2)),
        "kl": (truth * ((truth + 1e-12).log() - log_density)).sum((1, 2)),
    }


def _standardize(maps: Tensor) -> Tensor:
    """Mean 0 and deviation 1 per image; zeros for a constant map."""
    deviation = maps.std((1, 2), correction=0, keepdim=True)
    return torch.where(deviation > 0, (maps - maps.mean((1, 2), True)) / deviation, 0)


def _auc_judd(density: Tensor, fixated: Tensor) -> Tensor:
    """The area under the ROC curve of one image: thresholds at fixated pixels, all other pixels are negatives."""
    thresholds, values = density[fixated].sort(descending=True).values, density.flatten().sort().values
    hits = len(thresholds) - torch.searchsorted(thresholds.flip(0), thresholds)  # equal values count together
    above = values.numel() - torch.searchsorted(values, thresholds)
    false_alarms = (above - hits) / (values.numel() - len(thresholds))
    zero, one = torch.zeros(1, device=density.device), torch.ones(1, device=density.device)
    return torch.trapezoid(torch.cat([zero, hits / len(thresholds), one]), torch.cat([zero, false_alarms, one]))
