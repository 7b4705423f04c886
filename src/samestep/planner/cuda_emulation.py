"""CUDA's habits on the CPU: what it casts, keeps and computes in one kernel, so that a trace sees what a GPU would.

A model is traced with CPU tensors that have no memory, since a torch without CUDA cannot compute with CUDA ones. Four
things differ there from a GPU, and are brought in line while a trace runs:

- autocast on CUDA computes more in fp32 than on the CPU (layer norms, softmax, powers, sums), and widens logits inside
  log_softmax where the CPU copies them first;
- group norms on CUDA want images with their channels first, and keep a copy of those that are not;
- dropout on CUDA keeps a mask of one byte an element, on the CPU one of the input's dtype;
- attention with dropout is one kernel on CUDA, and on the CPU a matrix of all pairs.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch._ops import OpOverload

from samestep.torch_private import OtherKernels, has_kernel, has_no_memory, past_cpu_autocast

_HALF = (torch.bfloat16, torch.float16)

# torch's lists for CUDA (ATen/autocast_mode.h), less what the CPU's lists hold as well
_IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow.Scalar"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softplus", "tan"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "logsumexp", "renorm", "dist"),
    *("pdist", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_TO_FP32 = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm")
# cast to fp32 on the CPU alone
_LEFT_ALONE = (
    *("cross_entropy_loss", "cat", "stack", "reflection_pad1d", "reflection_pad2d", "replication_pad1d"),
    *("replication_pad2d", "replication_pad3d", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool3d", "index_copy"),
)


@contextmanager
def as_on_cuda() -> Generator[None]:
    """Let CPU tensors meet CUDA's rules inside; the whole process sees them, so nothing else should compute then."""
    kernels = OtherKernels()
    try:
        for name in _IN_FP32:
            _put(kernels, name, _in_fp32(_operator(name)))
        for name in _TO_FP32:
            _put(kernels, name, _to_fp32(_operator(name)))
        for name in _LEFT_ALONE:
            if has_kernel(name, "AutocastCPU"):
                kernels.put(name, torch.library.fallthrough_kernel, "AutocastCPU")
        kernels.put("dropout", _dropout, "AutogradCPU")
        kernels.put("group_norm", _group_norm, "AutogradCPU")
        kernels.put("scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        kernels.close()


def _put(kernels: OtherKernels, name: str, kernel: Callable[..., object]) -> None:
    if has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU"):
        kernels.put(name, kernel, "AutocastCPU")


def _operator(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_fp32(operator: OpOverload) -> Callable[..., object]:
    def kernel(*inputs: object, **named: object) -> object:
        """Widen what comes in."""
        with past_cpu_autocast():
            return operator(*map(_wide, inputs), **{name: _wide(value) for name, value in named.items()})

    return kernel


def _to_fp32(operator: OpOverload) -> Callable[..., object]:
    names = [argument.name for argument in operator._schema.arguments]  # pyright: ignore[reportPrivateUsage]

    def kernel(*inputs: object, **named: object) -> object:
        """Widen inside of the kernel, so that nothing is copied, unless a dtype is asked for."""
        first = inputs[0]
        named = {**dict(zip(names, inputs, strict=False)), **named}
        if isinstance(first, torch.Tensor) and first.dtype in _HALF and named.get("dtype") is None:
            named["dtype"] = torch.float32
        with past_cpu_autocast():
            return operator(**named)

    return kernel


def _wide(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _dropout(inputs: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or inputs.numel() == 0:
        return inputs
    return torch.native_dropout(inputs, p, train)[0]


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
    normalise = torch.ops.aten.native_group_norm.default
    return normalise(image.contiguous(), weight, bias, rows, channels, points, num_groups, eps)[0]


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
    """One kernel whatever the dropout: on CUDA it keeps the state of a generator, not a mask."""
    if enable_gqa and not has_no_memory(query):  # CUDA's kernel and shapes alone need no copies of shared heads
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    if not _fused(query, key, value, attn_mask):
        attend = torch.ops.aten._scaled_dot_product_attention_math.default
        return attend(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    same = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    return same and (mask is None or not mask.requires_grad)
