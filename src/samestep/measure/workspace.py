"""What CUDA's kernels take while they run, beyond what comes in and goes out: seen on an H200 with cuDNN 9.

cuDNN asks torch's allocator for it, so it counts as allocated. The rules below are those of the largest parts; what
they leave out is a few MiB each.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

Rule = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]
_HALF = (torch.bfloat16, torch.float16)
_FP32_BACKWARD = 2.3  # of input and output: cuDNN's choice for 3x3 kernels without TF32
_FP32_BACKWARD_CHANNELS_LAST = 3.3


def cuda_workspace(name: str, inputs: Sequence[object], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that CUDA's kernel for the operator takes."""
    rule = _RULES.get(name)
    return 0 if rule is None else int(rule([x for x in inputs if isinstance(x, torch.Tensor)], outputs))


def no_workspace(name: str, inputs: Sequence[object], outputs: Sequence[torch.Tensor]) -> int:
    """The same on a CPU, whose kernels take next to nothing."""
    return 0


def _convolution(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """Images that do not lie as the kernel wants them are turned around, in and out."""
    image, weight, result = inputs[0], inputs[1], outputs[0]
    turned = _nbytes(image) + _nbytes(result)
    if image.dtype not in _HALF:
        return turned if _channels_last(image) else 0
    if _channels_last(image) or _channels_last(weight):
        return _copied(image)
    return 0 if _pointwise(image, weight, result) else turned + _nbytes(weight)


def _convolution_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """The same, more where fp32 must not be TF32, and a wide copy for the gradient of a bias."""
    gradient, image, weight = inputs[:3]
    turned = _nbytes(image) + _nbytes(gradient)
    pointwise = _pointwise(image, weight, gradient)
    if image.dtype in _HALF:
        if _channels_last(image) or _channels_last(weight):
            return _copied(image) + (2 * _nbytes(gradient) if len(outputs) > 2 else 0)  # the third is a bias's
        return 0 if pointwise else turned + _nbytes(weight)
    if pointwise or image.shape[2:] != gradient.shape[2:]:
        return turned
    return turned * (_FP32_BACKWARD_CHANNELS_LAST if _channels_last(image) else _FP32_BACKWARD)


def _attention_backward(inputs: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> float:
    """Gradients of queries add up in fp32, those of shared heads in full before they are joined, a mask has one too."""
    query, key = inputs[1], inputs[2]
    rows = 2 * 4 * query.numel() // query.shape[-1]
    shared = 2 * _nbytes(query) if query.shape[1] != key.shape[1] else 0
    masked = _nbytes(inputs[6]) if len(inputs) > 6 else 0
    return 4 * query.numel() + rows + shared + masked


def _copied(image: torch.Tensor) -> int:
    """Where weights have their channels last, so must images."""
    return 0 if _channels_last(image) else _nbytes(image)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _channels_last(image: torch.Tensor) -> bool:
    return image.dim() == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


def _pointwise(image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a convolution is a product of matrices: a kernel of one point at every place."""
    return all(size == 1 for size in weight.shape[2:]) and image.shape[2:] == result.shape[2:]


_RULES: Mapping[str, Rule] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
