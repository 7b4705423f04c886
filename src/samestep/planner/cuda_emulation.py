"""Emulate CUDA on the CPU during a trace: which tensors autocast casts, and what kernels save for the backward pass.

A model is traced with CPU tensors that have no memory, because torch without CUDA cannot compute with CUDA tensors.
Seven things differ on a GPU and are emulated:

- autocast on CUDA computes more operators in fp32 (layer norm, softmax, powers, sums), and log_softmax converts logits
  inside its kernel, while the CPU makes a copy first;
- group norm on CUDA needs contiguous images and saves a copy of channels-last ones;
- dropout on CUDA saves no mask, since samestep's kernel computes it again, on the CPU a mask in the input's dtype;
- attention with dropout computes the attention weights, whose dropout is keyed by sample; without dropout it is one
  kernel on CUDA;
- recurrent layers are one call of cuDNN with a reserve space (cudnn_rnn.py);
- a grouped matrix product, as in mixtures of experts, works in every dtype, while torch computes shapes for bf16 only;
- a matrix product of bf16 or fp16 factors can have an fp32 result.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch._ops import OpOverload

from samestep.planner.cudnn_rnn import put_recurrent_kernels
from samestep.torch_private import OtherKernels, has_kernel, has_no_memory, past_cpu_autocast

_HALF = (torch.bfloat16, torch.float16)

# The lists of ATen/autocast_mode.h for CUDA, without the operators that are in the lists for the CPU too.
_FP32_OPS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow.Scalar"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softplus", "tan"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "logsumexp", "renorm", "dist"),
    *("pdist", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
# These take a dtype argument, so that the kernel converts its input without a copy.
_FP32_OUTPUT_OPS = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm"),
)
# Cast to fp32 on the CPU only.
_CPU_FP32_OPS = (
    *("cross_entropy_loss", "cat", "stack", "reflection_pad1d", "reflection_pad2d", "replication_pad1d"),
    *("replication_pad2d", "replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool3d", "index_copy"),
)


@contextmanager
def emulate_cuda() -> Generator[None]:
    """Let CPU tensors behave as on CUDA inside; this affects the whole process, so nothing else should compute."""
    kernels = OtherKernels()
    try:
        for names, cast in ((_FP32_OPS, _with_fp32_inputs), (_FP32_OUTPUT_OPS, _with_fp32_output)):
            for name in names:
                if has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU"):
                    kernels.put(name, cast(_operator(name)), "AutocastCPU")
        for name in _CPU_FP32_OPS:
            if has_kernel(name, "AutocastCPU"):
                kernels.put(name, torch.library.fallthrough_kernel, "AutocastCPU")
        kernels.put("dropout", _dropout, "AutogradCPU")
        kernels.put("group_norm", _group_norm, "AutogradCPU")
        kernels.put("scaled_dot_product_attention", _attention, "AutogradCPU")
        kernels.put("_grouped_mm", _grouped_mm_shape, "Meta")
        if has_kernel("mm.dtype", "Meta"):  # linear_cross_entropy looks whether the device has it
            kernels.put("mm.dtype", _mm_into_dtype, "CPU")
        put_recurrent_kernels(kernels, _dropout)
        yield
    finally:
        kernels.close()


def _operator(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _with_fp32_inputs(operator: OpOverload) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        with past_cpu_autocast():
            return operator(*map(_to_fp32, args), **{name: _to_fp32(value) for name, value in kwargs.items()})

    return kernel


def _with_fp32_output(operator: OpOverload) -> Callable[..., object]:
    names = [argument.name for argument in operator._schema.arguments]  # pyright: ignore[reportPrivateUsage]

    def kernel(*args: object, **kwargs: object) -> object:
        first = args[0]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(first, torch.Tensor) and first.dtype in _HALF and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        with past_cpu_autocast():
            return operator(**kwargs)

    return kernel


def _to_fp32(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _dropout(inputs: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or inputs.numel() == 0:
        return inputs
    dropped: torch.Tensor = _DropoutWithoutMask.apply(inputs)  # pyright: ignore[reportAssignmentType]  # untyped in torch
    return dropped


class _DropoutWithoutMask(torch.autograd.Function):
    """The memory of parallel/keyed_dropout.py: one output, and nothing kept for the backward pass."""

    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy the inputs."""
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy the gradient."""
        return gradient.clone()


def _group_norm(
    image: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    rows, channels = image.shape[:2]
    points = image.numel() // max(1, rows * channels)
    normalize = torch.ops.aten.native_group_norm.default
    return normalize(image.contiguous(), weight, bias, rows, channels, points, num_groups, eps)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """One kernel without dropout; with dropout the attention weights, as in parallel/draw_rules.py."""
    # the CUDA kernels for bf16 and fp16 need no copies of shared heads, and neither do shapes
    copies_heads = enable_gqa and query.shape[-3] != key.shape[-3] and query.dtype not in _HALF
    if enable_gqa and (dropout_p or copies_heads or not has_no_memory(query)):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if dropout_p:
        # where a GPU computes, autocast is on here, and it computes a softmax in fp32
        dtype = torch.float32 if query.dtype in _HALF else query.dtype
        weights = (query @ key.transpose(-2, -1)).softmax(-1, dtype=dtype).to(value.dtype)
        return _dropout(weights, dropout_p, True) @ value
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    same_width = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    has_fused_kernel = same_width and not copies_heads and (attn_mask is None or not attn_mask.requires_grad)
    if not has_fused_kernel:
        attend = torch.ops.aten._scaled_dot_product_attention_math.default
        return attend(query, key, value, attn_mask, 0.0, is_causal, None, scale=scale)[0]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _mm_into_dtype(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(first.to(dtype), second.to(dtype))


def _grouped_mm_shape(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of a grouped matrix product; on CUDA its rows begin at multiples of 16 bytes."""
    columns, dtype = second.shape[-1], out_dtype or first.dtype
    if first.dim() == 2 and second.dim() == 2 and offs is not None:  # groups of columns times groups of rows
        size = (offs.shape[0], first.shape[0], columns)
    else:
        size = (*first.shape[:-1], columns) if second.dim() == 3 else (first.shape[1], columns)
    step = max(1, 16 // dtype.itemsize)
    padded = -(-columns // step) * step
    strides = (padded, 1) if len(size) == 2 else (size[1] * padded, padded, 1)
    return first.new_empty_strided(size, strides, dtype=dtype)
