"""Cross entropy of a linear layer in chunks of tokens: the logits of all tokens never exist at once.

The losses are multiplied by masks and counts later, in `step.mean`. The gradient of the weight is a sum over tokens in
which each token has its own factor, so the forward pass cannot compute it. The backward pass computes the logits of
each chunk a second time instead. That is one more product with the weight, about a third of the head's cost, and saves
reading and writing logits, log-probabilities and their gradient for all tokens. If weight and bias are frozen, as with
LoRA, the forward pass computes the gradients of the hidden states without these factors, and no product is repeated.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from samestep.errors import SamestepError, StepError
from samestep.torch_private import has_kernel, has_no_memory, is_dtensor

_LOGITS_BYTES: Final = 256 * 2**20  # of a default chunk, in the dtype of the softmax
_TILE: Final = 128  # tokens; kernels of GPUs multiply tiles of this size
_HALF: Final = (torch.float16, torch.bfloat16)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), labels, reduction="none")` without the logits of all tokens.

    `hidden` is (..., width), `weight` (classes, width), and `labels` (...) has one class per token. The losses have the
    shape of `labels`, for `step.mean(losses, mask)`. They are zero where the label is `ignore_index`, which `step.mean`
    still counts: pass `mask=labels != -100` too. Call it in the `forward` of your model and return the losses: FSDP has
    gathered the weight only there. Tied weights, activation checkpointing and `torch.compile` work.

    Forward and backward pass handle `chunk` tokens at a time, by default as many as have 256 MiB of logits, whatever
    the number of classes. They need memory for twice the logits of a chunk. Other chunks give the same result up to
    rounding. The backward pass computes the logits again, unless weight and bias are frozen, since `step.mean` weights
    tokens after the forward pass. It cannot be differentiated twice.

    Under autocast, inputs of products have its dtype. Logits, losses and the sums of gradients over chunks are fp32, or
    fp64 if the inputs are. An invalid label raises on the CPU; on a GPU, where a check would wait for the device, it is
    a device-side assert as in torch.

    >>> hidden, weight, labels = torch.randn(2, 5, 8), torch.randn(100, 8), torch.zeros(2, 5, dtype=torch.long)
    >>> linear_cross_entropy(hidden, weight, labels).shape
    torch.Size([2, 5])
    """
    _check_shapes(hidden, weight, labels, bias)
    dtype = _dtype_of_products(hidden, weight)
    if chunk is None:
        chunk = _default_chunk(weight.shape[0], dtype)
    elif chunk < 1:
        raise SamestepError(f"linear_cross_entropy got chunk={chunk}: pass a number of tokens, at least 1, or omit it")
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    keep = torch.is_grad_enabled() and hidden.requires_grad and not trains
    compute = _losses_operator if torch.compiler.is_compiling() else _LinearCrossEntropy.apply
    return compute(hidden, weight, bias, labels, dtype, ignore_index, chunk, keep)[0]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportReturnType]  # untyped in torch


class _LinearCrossEntropy(torch.autograd.Function):
    """The losses outside of compiled code. Tools such as `samestep plan` see every operation of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """The losses, and the gradients of the hidden states if weight and bias are frozen."""
        output = _losses(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of hidden states, weight and bias; None for other inputs."""
        if torch.is_grad_enabled():
            raise StepError(
                "linear_cross_entropy has no second derivative, and the backward pass was called with "
                "create_graph=True: compute the loss with cross_entropy(linear(hidden, weight), labels) instead"
            )
        return _backward(_gradients, ctx, *grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *ctx.options, ctx.kept = inputs[4:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*((inputs[0], output[1]) if ctx.kept else inputs[:4]))


def _backward(
    function: Callable[..., list[Tensor]], ctx: Any, grad: Tensor | None, _: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    needed: list[bool] = list(ctx.needs_input_grad[:3])
    if grad is None:
        return (None,) * 8
    if ctx.kept:
        hidden, kept = ctx.saved_tensors
        found = iter([(kept * grad.to(kept.dtype)[..., None]).to(hidden.dtype)])
    else:
        found = iter(function(grad, *ctx.saved_tensors, *ctx.options, needed))
    return *(next(found) if each else None for each in needed), *(None,) * 5


def _losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    chunk: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The losses, and with `keep` the gradients of the hidden states for losses with gradients of one."""
    _check_labels(labels, weight.shape[0], ignore_index)
    wide = _wide(dtype)
    losses = hidden.new_empty(labels.shape, dtype=wide)  # returned as it is: FSDP warns about views
    kept = hidden.new_empty(hidden.shape if keep else 0, dtype=wide)
    by_token, rows, classes = losses.view(-1), hidden.reshape(-1, hidden.shape[-1]), _classes(labels, ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        weight, bias = _operand(weight, dtype), None if bias is None else bias.to(wide)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            inputs = _operand(rows[part], dtype)
            log_probabilities = _logits(inputs, weight, bias).log_softmax(dim=-1)
            by_token[part] = log_probabilities.gather(1, classes[part, None]).neg_()[:, 0]
            if keep:
                for_logits = _minus_one_hot(log_probabilities.exp_(), classes[part]).to(inputs.dtype)
                kept.view(-1, kept.shape[-1])[part] = _product(for_logits, weight)
                del for_logits
            del log_probabilities  # before the logits of the next chunk exist
    ignored = labels == ignore_index
    return losses.masked_fill_(ignored, 0.0), kept.masked_fill_(ignored[..., None], 0.0) if keep else kept


def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    chunk: int,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight and bias that are needed, given those of the losses."""
    wide = _wide(dtype)
    grad = grad.to(wide).masked_fill(labels == ignore_index, 0.0).reshape(-1)
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), _classes(labels, ignore_index)
    for_rows = rows.new_empty(rows.shape) if needed[0] else None
    for_weight = weight.new_zeros(weight.shape, dtype=wide) if needed[1] else None
    for_bias = None if bias is None or not needed[2] else bias.new_zeros(bias.shape, dtype=wide)
    with torch.autocast(hidden.device.type, enabled=False):
        layer, wide_bias = _operand(weight, dtype), None if bias is None else bias.to(wide)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            inputs = _operand(rows[part], dtype)
            for_logits = _chunk_gradient(grad[part], inputs, layer, wide_bias, classes[part])
            if for_rows is not None:
                for_rows[part] = for_logits @ layer
            if for_weight is not None:
                _add_product(for_weight, for_logits.t(), inputs)
            if for_bias is not None:
                for_bias += for_logits.sum(dim=0, dtype=wide)
            del for_logits  # before the logits of the next chunk exist
    found = (for_rows, hidden), (for_weight, weight), (for_bias, bias)
    return [each.to(given.dtype).view(given.shape) for each, given in found if each is not None and given is not None]


def _chunk_gradient(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The gradient of the logits of a chunk, (softmax - one_hot) * grad, as an input of products."""
    gradient = _minus_one_hot(_logits(hidden, weight, bias).softmax(dim=-1), labels)
    if gradient.dtype == hidden.dtype:
        return gradient.mul_(grad[:, None])
    return torch.mul(gradient, grad[:, None], out=gradient.new_empty(gradient.shape, dtype=hidden.dtype))


def _minus_one_hot(probabilities: Tensor, labels: Tensor) -> Tensor:
    """In place: the gradient of the losses with respect to the logits."""
    return probabilities.scatter_add_(1, labels[:, None], probabilities.new_full((len(labels), 1), -1.0))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = _product(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In fp32 or fp64, also if the factors are in half precision."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.dtype in _HALF else torch.mm(left, right)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not has_no_memory(left) and _adds_in_fp32(left.device, left.dtype):  # a trace cannot know it
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(_product(left, right))


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product in half precision to an fp32 total: the first versions with `out_dtype` raise.

    Otherwise the total of the weight's gradient is read and written once more for every chunk.
    """
    total, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _classes(labels: Tensor, ignore_index: int) -> Tensor:
    """A valid class per token, also for tokens that do not count."""
    return labels.long().masked_fill(labels == ignore_index, 0).reshape(-1)


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the dtype of products; on a device without products into fp32, then in fp32."""
    rounded = tensor.to(dtype)
    return rounded if _multiplies_into_fp32(tensor.device) else rounded.to(_wide(dtype))


def _multiplies_into_fp32(device: torch.device) -> bool:
    """Whether half precision has products into fp32: on CUDA, and on the CPU while a trace emulates CUDA there."""
    return device.type == "cuda" or has_kernel("mm.dtype", device.type.upper())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _dtype_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """That of autocast, which leaves fp64 as it is, or else that of the inputs."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise StepError(
            f"linear_cross_entropy got hidden states in {hidden.dtype} and a weight in {weight.dtype}: convert one of "
            "them, or compute the losses under autocast, in the forward of a model from run.wrap"
        )
    return hidden.dtype


def _default_chunk(classes: int, dtype: torch.dtype) -> int:
    """As many tokens as have logits of 256 MiB, a multiple of 128 if possible."""
    tokens = _LOGITS_BYTES // (classes * _wide(dtype).itemsize)
    return max(tokens - tokens % _TILE, min(tokens, _TILE), 1)


# The losses in compiled code: operators that the compiler does not look into. It would notice that both passes compute
# the same logits, and keep those of all tokens from one to the other.


@torch.library.custom_op("samestep::linear_cross_entropy", mutates_args=())
def _losses_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    chunk: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _losses(hidden, weight, bias, labels, dtype, ignore_index, chunk, keep)


@torch.library.custom_op("samestep::linear_cross_entropy_backward", mutates_args=())
def _gradients_operator(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    chunk: int,
    needed: list[bool],
) -> list[Tensor]:
    return _gradients(grad, hidden, weight, bias, labels, dtype, ignore_index, chunk, needed)


@_losses_operator.register_fake
def _(
    hidden: Tensor, _weight: Tensor, _bias: Tensor | None, labels: Tensor, dtype: torch.dtype, *options: int
) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(labels.shape, dtype=_wide(dtype))
    return losses, losses.new_empty(hidden.shape if options[-1] else 0)


@_gradients_operator.register_fake
def _(_grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> list[Tensor]:
    inputs = zip((hidden, weight, bias), options[-1], strict=True)
    return [each.new_empty(each.shape) for each, needed in inputs if each is not None and needed]


_losses_operator.register_autograd(partial(_backward, _gradients_operator), setup_context=_save)


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if is_dtensor(weight) or is_dtensor(bias):
        raise StepError(
            f"linear_cross_entropy got a sharded weight (a DTensor of shape {tuple(weight.shape)}): FSDP gathers it "
            "only while the module that holds it runs, so call linear_cross_entropy in the forward of the wrapped "
            "model and return the losses; if blocks= contains the class of the head, call it in the forward of the head"
        )
    if not hidden.is_floating_point() or weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise StepError(
            f"linear_cross_entropy got hidden states of {hidden.dtype} and shape {tuple(hidden.shape)} for a weight of "
            f"shape {tuple(weight.shape)}: pass floating point (..., width) and (classes, width), as in nn.Linear"
        )
    if labels.shape != hidden.shape[:-1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise StepError(
            f"linear_cross_entropy got labels of {labels.dtype} and shape {tuple(labels.shape)} for hidden states of "
            f"shape {tuple(hidden.shape)}: pass one integer class per token, of shape {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise StepError(
            f"linear_cross_entropy got a bias of shape {tuple(bias.shape)} for a weight of shape "
            f"{tuple(weight.shape)}: pass one value per class, of shape ({weight.shape[0]},)"
        )


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    if labels.device.type != "cpu" or has_no_memory(labels):
        return
    invalid = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    if invalid.any():
        position = tuple(invalid.nonzero()[0].tolist())
        raise StepError(
            f"linear_cross_entropy got the label {int(labels[position])} at {list(position)}, and the weight has "
            f"{classes} classes: pass labels from 0 to {classes - 1}, or {ignore_index} (ignore_index) for tokens that "
            "do not count"
        )
