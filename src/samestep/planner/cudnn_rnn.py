"""Recurrent layers as cuDNN computes them: what they keep for the backward pass, in place of the many tensors of a CPU.

cuDNN computes all time steps and layers in one call. For the backward pass torch keeps the input, the output, the
weights and cuDNN's reserve space; aten/src/ATen/native/cudnn/RNN.cpp allocates them. cuDNN does not document the size
of the reserve space. With N time steps of all samples, D directions, L layers, hidden size H and projected size P (0
without a projection) it holds these numbers, in the dtype of the computation:

    N * D * (k * H * L + P * L + H * (L - 1))    k = 5 for an LSTM, 6 with a projection, 6 for a GRU, 1 for a plain RNN

For an LSTM, k counts four gates and the cell state; H * (L - 1) are the outputs of the inner layers. The sizes that
cuDNN reported in https://github.com/pytorch/pytorch/issues/2895 agree to the byte: an LSTM and a GRU with 4 layers of
320, 25,000 time steps, 736,000,000 and 864,000,000 bytes; and so do those of cuDNN 9.19. The workspace, which cuDNN
needs while it runs, was fitted on that version. Under autocast the computation is in fp16, also with bf16, and the
weights are copied into an fp16 buffer (aten/src/ATen/cudnn/AutocastRNN.cpp).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.torch_private import OtherKernels, has_no_memory

Dropout = Callable[[torch.Tensor, float, bool], torch.Tensor]

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class RecurrentLayers:
    """The shape of one call of cuDNN."""

    kind: str  # the operator: lstm, gru, rnn_tanh or rnn_relu
    layers: int
    directions: int
    hidden: int  # hidden size
    output: int  # size of the output of one direction: the hidden size, or the size of the projection
    train: bool
    batch_first: bool  # whether the batch is the first dimension, the time the second
    copies_weights: bool  # whether the weights are not in one chunk of memory, so that cuDNN copies them
    packed: bool = False  # whether sequences have different lengths

    @property
    def projection(self) -> int:
        """The size of the projection, 0 without one."""
        return 0 if self.output == self.hidden else self.output

    def reserve(self, rows: int) -> int:
        """Numbers in the reserve space for `rows` time steps of all samples.

        >>> RecurrentLayers("lstm", 4, 1, 320, 320, True, False, False).reserve(25_000) * 4
        736000000
        >>> RecurrentLayers("gru", 4, 1, 320, 320, True, False, False).reserve(25_000) * 4
        864000000
        """
        if not self.train:
            return 0
        kept = _KEPT[self.kind] + bool(self.projection)
        per_layer = kept * self.hidden + self.projection
        return rows * self.directions * (per_layer * self.layers + self.hidden * (self.layers - 1))

    def workspace(self, rows: int, samples: int, inputs: int, weights: int, itemsize: int) -> int:
        """Bytes that cuDNN needs while it computes `rows` time steps of `samples` sequences of `inputs` numbers.

        cuDNN does not document them either. This was fitted on 109 shapes with cuDNN 9.19 on an H200: of the memory of
        an LSTM or a GRU with more than a few megabytes it is within 2 %, of a plain RNN within 12 %.
        """
        if not self.train:
            return weights * itemsize
        states = 10 * samples * self.hidden * self.layers * self.directions
        per_row = self._workspace_per_row(inputs) + self.directions * self.projection
        return itemsize * (int(rows * per_row) + weights + states) + self.layers * self.directions * 2**23

    def _workspace_per_row(self, inputs: int) -> float:
        one_layer, gates, hidden = self.layers == 1, _GATES[self.kind], self.hidden
        if self.packed:
            return gates * hidden if self.directions == 1 else (2 * gates + 4) * hidden
        gates = max(gates, 3)
        if self.directions == 1:
            narrow = (gates + 1) * hidden + (2 * inputs if one_layer and gates == 3 else inputs)
            return max(narrow, (3 if one_layer else 2) * hidden + 3 * inputs)
        narrow = (2 * gates + 6) * hidden + inputs + (0 if one_layer or gates == 4 else 0.75 * hidden)
        return max(narrow, (6 if one_layer else 8) * hidden + 6 * inputs)


def put_recurrent_kernels(kernels: OtherKernels, dropout: Dropout) -> None:
    """Let recurrent layers on shapes need the memory of cuDNN; with values they compute as on the CPU.

    `dropout` is applied between the layers, as parallel/draw_rules.py does.
    """
    for kind in _GATES:
        packet = getattr(torch.ops.aten, kind)
        kernels.put(f"{kind}.input", _padded_kernel(kind, packet.input, dropout), "AutogradCPU")
        kernels.put(f"{kind}.data", _packed_kernel(kind, packet.data), "AutogradCPU")


def _padded_kernel(kind: str, operator: Any, dropout: Dropout) -> Callable[..., object]:
    def kernel(
        data: torch.Tensor, state: Any, weights: list[torch.Tensor], biases: bool, layers: int, p: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> object:  # fmt: skip
        if not has_no_memory(data):
            return operator.decompose(data, state, weights, biases, layers, p, train, bidirectional, batch_first)
        states = [state] if isinstance(state, torch.Tensor) else list(state)
        by_layer = train and p > 0 and layers > 1
        copies = by_layer and not torch.is_autocast_enabled("cpu")
        per_call, directions = 1 if by_layer else layers, 1 + bool(bidirectional)
        own, finals = len(weights) // layers * per_call, list[list[torch.Tensor]]()
        for at in range(layers // per_call):
            start = [part[at * per_call * directions : (at + 1) * per_call * directions] for part in states]
            shape = RecurrentLayers(
                kind, per_call, directions, states[-1].shape[-1], states[0].shape[-1], train, batch_first, copies
            )
            data, *final = _call(shape, data, start, weights[at * own : (at + 1) * own])
            finals.append(final)
            if at < layers // per_call - 1:
                data = dropout(data, p, train)
        return data, *(torch.cat(parts) if by_layer else parts[0] for parts in zip(*finals, strict=True))

    return kernel


def _packed_kernel(kind: str, operator: Any) -> Callable[..., object]:
    def kernel(
        data: torch.Tensor, batch_sizes: torch.Tensor, state: Any, weights: list[torch.Tensor], biases: bool,
        layers: int, p: float, train: bool, bidirectional: bool,
    ) -> object:  # fmt: skip
        if not has_no_memory(data):
            return operator.decompose(data, batch_sizes, state, weights, biases, layers, p, train, bidirectional)
        states = [state] if isinstance(state, torch.Tensor) else list(state)
        shape = RecurrentLayers(
            kind, layers, 1 + bool(bidirectional), states[-1].shape[-1], states[0].shape[-1], train, False, False, True
        )
        return _call(shape, data, states, weights)

    return kernel


def _call(
    shape: RecurrentLayers, data: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    if torch.is_autocast_enabled("cpu"):
        data, *rest = (each.to(torch.float16) for each in (data, *states, *weights))
        states, weights = rest[: len(states)], rest[len(states) :]
    with torch.autocast("cpu", enabled=False):
        return _CudnnCall.apply(shape, len(states), data, *states, *weights)  # pyright: ignore[reportReturnType]  # untyped in torch


class _CudnnCall(torch.autograd.Function):
    """The memory and the matrix products of `_cudnn_rnn` and its backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: RecurrentLayers, states: int, data: torch.Tensor, *rest: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Allocate what cuDNN allocates, and multiply into the reserve space."""
        start, weights = rest[:states], rest[states:]
        copied = [data.new_empty(sum(w.numel() for w in weights))] if shape.copies_weights else []
        _ordered(data, shape)  # a copy in the order of time steps, for as long as the kernel runs
        output = _new_output(data, shape)
        final = [torch.empty_like(part) for part in start]
        reserve = data.new_empty(shape.reserve(data.numel() // data.shape[-1]))
        _allocate_workspace(data, start, weights, shape)
        _multiply(reserve, data, weights, shape)
        ctx.shape, ctx.states = shape, states
        ctx.save_for_backward(data, output, reserve, *rest, *copied)
        return output, *final

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of the input and the states, then all gradients of weights in one chunk of memory."""
        shape: RecurrentLayers = ctx.shape
        data, _, reserve, *rest = ctx.saved_tensors
        end = -1 if shape.copies_weights else None
        start, weights = rest[: ctx.states], rest[ctx.states : end]
        upstream = _ordered(gradients[0], shape)
        to_data, to_states = torch.empty_like(data), [torch.empty_like(part) for part in start]
        _allocate_workspace(data, start, weights, shape)
        _multiply(reserve, data, weights, shape)
        del upstream
        chunk = data.new_zeros(sum(w.numel() for w in weights))
        ordered = _ordered(data, shape)
        _allocate_workspace(data, start, weights, shape)
        _multiply(reserve, data, weights, shape)
        del ordered
        sizes = [w.numel() for w in weights]
        to_weights = [part.view(w.shape) for part, w in zip(chunk.split(sizes), weights, strict=True)]
        return None, None, to_data, *to_states, *to_weights


def _ordered(tensor: torch.Tensor, shape: RecurrentLayers) -> torch.Tensor:
    """The tensor with the time as its first dimension, contiguous."""
    return (tensor.transpose(0, 1) if shape.batch_first and tensor.dim() == 3 else tensor).contiguous()


def _new_output(data: torch.Tensor, shape: RecurrentLayers) -> torch.Tensor:
    width = shape.directions * shape.output
    if not shape.batch_first or data.dim() < 3:
        return data.new_empty(*data.shape[:-1], width)
    return data.new_empty(data.shape[1], data.shape[0], width).transpose(0, 1)


def _allocate_workspace(
    data: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], shape: RecurrentLayers
) -> None:
    """Allocate and free the memory that cuDNN needs while it runs."""
    inputs = data.shape[-1]
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    samples = states[0].numel() // (shape.layers * shape.directions * shape.output)
    size = shape.workspace(data.numel() // inputs, samples, inputs, matrices, data.element_size())
    data.new_empty(size // data.element_size())


def _multiply(
    reserve: torch.Tensor, data: torch.Tensor, weights: Sequence[torch.Tensor], shape: RecurrentLayers
) -> None:
    """The products of every layer with its input and its state, to count their FLOPs; allocates nothing in training."""
    rows = data.numel() // data.shape[-1]
    gates = reserve if shape.train else data.new_empty(rows * _GATES[shape.kind] * shape.hidden)
    for weight in weights:
        if weight.dim() == 2:
            inputs = gates.as_strided((rows, weight.shape[1]), (0, 0))
            torch.mm(inputs, weight.t(), out=gates.as_strided((rows, weight.shape[0]), (weight.shape[0], 1)))
