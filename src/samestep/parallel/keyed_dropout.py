"""Dropout whose mask belongs to the samples: on a GPU a Triton kernel, which recomputes the mask in the backward pass.

The mask is `sample_rng.keep_mask` on every device. The CPU keeps it for the backward pass, as torch does. The kernel
reads the key of a row and computes four neighbors from one 64-bit word, so that nothing but the keys is kept.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from samestep.data.sample_rng import dimension_strides, keep_mask, keep_threshold, salt_word
from samestep.parallel.dropout_kernel import load_kernel

_MAX_DIMENSIONS: Final = 3  # of a sample, in the kernel
_BLOCK_WORDS: Final = 512
_MAX_ROWS: Final = 65535  # of the second dimension of a CUDA grid
_KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)  # Triton rounds the scale to float32


def dropout(inputs: Tensor, keys: Tensor, salt: int, p: float) -> Tensor:
    """Drop elements of `inputs`, of shape (rows, ...), by the keys of its rows, and scale the others by 1 / (1 - p)."""
    if p >= 1.0:
        return inputs * 0.0
    if not torch.compiler.is_compiling() and _fits_kernel(inputs):
        return _KernelDropout.apply(inputs.contiguous(), keys, salt, p)  # pyright: ignore[reportReturnType]  # untyped in torch
    mask = keep_mask(keys, inputs.shape[1:], salt, p)
    return _scale_kept(inputs, mask, p)


def _scale_kept(inputs: Tensor, mask: Tensor, p: float) -> Tensor:
    if torch.compiler.is_compiling():  # one fused kernel in any case
        return torch.where(mask, inputs, 0.0) * (1.0 / (1.0 - p))
    return inputs * mask.to(inputs.dtype).mul_(1.0 / (1.0 - p))


def _fits_kernel(inputs: Tensor) -> bool:
    return (
        inputs.is_cuda
        and inputs.dtype in _KERNEL_DTYPES
        and 2 <= inputs.dim() <= _MAX_DIMENSIONS + 1
        and inputs.numel() > 0
        and inputs.shape[0] <= _MAX_ROWS
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class _KernelDropout(torch.autograd.Function):
    """The kernel with its backward pass, which is the same kernel on the gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, keys: Tensor, salt: int, p: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the keys, not the mask."""
        ctx.save_for_backward(keys)
        ctx.salt, ctx.p = salt, p
        return _launch(inputs, keys, salt, p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Drop and scale the gradient like the inputs."""
        (keys,) = ctx.saved_tensors
        return dropout(gradient, keys, ctx.salt, ctx.p), None, None, None


def _launch(inputs: Tensor, keys: Tensor, salt: int, p: float) -> Tensor:
    outputs, missing = torch.empty_like(inputs), _MAX_DIMENSIONS - (inputs.dim() - 1)
    n0, n1, n2 = [1] * missing + list(inputs.shape[1:])
    stride0, stride1, _ = [0] * missing + dimension_strides(inputs.dim() - 1)
    words = n0 * n1 * -(-n2 // 4)
    grid = (-(-words // _BLOCK_WORDS), inputs.shape[0])
    numbers = salt_word(salt), keep_threshold(p) + (1 << 15), 1.0 / (1.0 - p), words, n1, n2, stride0, stride1
    if inputs.device.index == torch.cuda.current_device():
        load_kernel()[grid](inputs, outputs, keys, *numbers, BLOCK=_BLOCK_WORDS)
    else:
        with torch.cuda.device(inputs.device):
            load_kernel()[grid](inputs, outputs, keys, *numbers, BLOCK=_BLOCK_WORDS)
    return outputs
