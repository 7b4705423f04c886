"""The moments of a step that can be its worst: two traces of different micro-batches joined into lines."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.planner.model_profile import Moment, Peak
from samestep.planner.operations import Work

_SMALLEST = 512
_LARGE = 10 * 2**20
_SEGMENT = 2 * 2**20
_REST = 2**20

CUDA_LIBRARIES = 64 * 2**20
"""Bytes that cuBLAS keeps from its first product on: 32 MiB on Hopper for each thread that computes, and the backward
pass has a thread of its own. Older GPUs take 8 MiB each."""


def allocated(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes.

    Sizes are rounded up to 512 bytes. Above 10 MiB memory comes in multiples of 2 MiB, and a rest below 1 MiB is not
    cut off.

    >>> allocated(0), allocated(1), allocated(513), allocated(int(11.5 * 2**20)) / 2**20
    (0, 512, 1024, 12.0)
    """
    rounded = -(-size // _SMALLEST) * _SMALLEST
    if rounded < _LARGE:
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    return segment if segment - rounded <= _REST else rounded


def exact(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes where nothing is rounded.

    >>> exact(513)
    513
    """
    return size


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


Workspace = Callable[[str, Sequence[object], Sequence[torch.Tensor]], int]


@dataclass
class Notes:
    """What was noted, moment by moment."""

    names: list[str] = field(default_factory=list)
    """The operation after which memory was looked at."""
    used: list[int] = field(default_factory=list)
    """Bytes in use then, gradients too, as the allocator rounds them."""
    exact: list[int] = field(default_factory=list)
    """The same, not rounded."""
    gradients: list[int] = field(default_factory=list)
    """Bytes of gradients among them."""


class Tracker(TorchDispatchMode):
    """A dispatch mode that counts bytes by storage, so that views cost nothing and tied weights count once."""

    def __init__(self, round_up: Callable[[int], int], workspace: Workspace, work: Work | None = None) -> None:
        super().__init__()
        self.notes = Notes()
        self.work = work
        self._round_up, self._workspace = round_up, workspace
        self._used = self._exact = self._gradients = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._marked: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes in use now."""
        return self._used

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that stood before the tracker began."""
        for tensor in tensors:
            self._meet(tensor)

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient, which stands from now on, as one."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        self._meet(gradient)
        key = id(gradient.untyped_storage())
        if key not in self._marked and key in self._alive:
            self._marked[key] = self._round_up(gradient.untyped_storage().nbytes())
            self._gradients += self._marked[key]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation as it is, then see which storages are new."""
        named = kwargs or {}
        result = func(*args, **named)
        if func.namespace == "prim":  # questions about a tensor
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        new = [self._meet(tensor) for tensor in outputs]
        inputs = tree_leaves((args, named))
        name = str(func.overloadpacket)
        if self.work is not None:
            self.work.add(func, args, named, result, inputs, outputs)
        aside = self._workspace(name, inputs, outputs)
        if any(new) or aside:
            self._note(name, aside)
        return result

    def _note(self, name: str, aside: int) -> None:
        self.notes.names.append(name)
        self.notes.used.append(self._used + aside)
        self.notes.exact.append(self._exact + aside)
        self.notes.gradients.append(self._gradients)

    def _meet(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor from now to its end; whether it is new."""
        if tensor.layout != torch.strided:
            return bool([part for part in _dense_parts(tensor) if self._meet(part)])
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return False
        exact = storage.nbytes()
        size = self._round_up(exact)
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size, exact)
        self._used += size
        self._exact += exact
        return True

    def _forget(self, key: int) -> None:
        _, size, exact = self._alive.pop(key)
        self._used -= size
        self._exact -= exact
        self._gradients -= self._marked.pop(key, 0)


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a sparse tensor is made of."""
    if tensor.layout != torch.sparse_coo:
        return []
    return [tensor._indices(), tensor._values()]  # pyright: ignore[reportPrivateUsage]  # torch has no other way to see those of one that is not coalesced


_SHARDS = (1, 2, 3, 4, 8, 16, 64, 1024)


def peak_of(small: Notes, large: Notes, sizes: tuple[int, int], standing: int, gradients: int, extra: Moment) -> Peak:
    """Join what was noted with two micro-batches of `sizes` samples.

    `standing` are the bytes of weights and optimizer state, `gradients` those of all gradients; `extra` is added to
    every moment.
    """
    if small.names == large.names:
        at = list(zip(range(len(small.names)), range(len(large.names)), strict=True))
    else:  # what runs depends on the micro-batch: the two peaks alone can be joined
        at = [(_highest(small), _highest(large))]
    moments = [_line(sizes, small, large, a, b, standing, extra) for a, b in at]
    return Peak(tuple(_worst(moments)), gradients)


def _highest(notes: Notes) -> int:
    return max(range(len(notes.used)), key=notes.used.__getitem__)


def _line(sizes: tuple[int, int], small: Notes, large: Notes, a: int, b: int, standing: int, extra: Moment) -> Moment:
    """The line through two moments; what rounding swallows of small tensors still grows with the micro-batch."""
    rounded, exact = large.used[b] - small.used[a], large.exact[b] - small.exact[a]
    per_sample = -(-max(rounded, exact) // (sizes[1] - sizes[0]))
    fixed = large.used[b] - large.gradients[b] - per_sample * sizes[1] - standing
    return Moment(fixed + extra.fixed, per_sample + extra.per_sample, large.gradients[b])


def _worst(moments: Sequence[Moment]) -> list[Moment]:
    """Those that are the worst for some micro-batch, with gradients whole, in shards, or standing all the time."""
    kept: dict[Moment, None] = {}
    for shards in (*_SHARDS, 0):
        kept.update(dict.fromkeys(_upper(moments, shards)))
    return list(kept)


def _upper(moments: Sequence[Moment], shards: int) -> Iterator[Moment]:
    """The upper envelope of the lines, from the micro-batch of one sample on."""

    def height(moment: Moment, samples: float) -> float:
        """Bytes at so many samples."""
        return moment.fixed + moment.per_sample * samples + (moment.gradients / shards if shards else 0)

    current, samples = max(moments, key=lambda m: (height(m, 1), m.per_sample)), 1.0
    while True:
        yield current
        steeper = [m for m in moments if m.per_sample > current.per_sample]
        if not steeper:
            return
        meets = [(height(current, 0) - height(m, 0)) / (m.per_sample - current.per_sample) for m in steeper]
        samples = min(meets)
        current = max((m for m, at in zip(steeper, meets, strict=True) if at == samples), key=lambda m: m.per_sample)
