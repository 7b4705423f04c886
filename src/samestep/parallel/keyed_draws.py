"""Random numbers that a model draws, keyed by sample: the same on any number of ranks and any micro-batch size.

While a micro-batch is computed, `KeyedDraws` sees every call of a torch function. A draw with one slice per row of the
micro-batch, such as dropout of activations, is replaced by numbers from the keys of the rows (data/sample_rng.py) and
the number of the draw. Any other draw gets its numbers from the key of the step, so that all ranks draw the same.

The number of a draw is found by the state of torch's CPU generator, which each draw advances. Activation checkpointing
restores this state before it computes a layer again, so the layer draws the same numbers again.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.data.sample_rng import normal, uniform
from samestep.parallel.keyed_dropout import dropout
from samestep.torch_private import without_override_check

Warn = Callable[[str, str], None]
Draw = Callable[[Tensor, Sequence[int], int], Tensor]  # keys, sizes of one row, number of the draw


@dataclass(frozen=True)
class Layout:
    """Where the rows of the micro-batch are in a tensor: in dimension `dim`, with `parts` entries for each row.

    The entries of a row are neighbors, as in (rows * tokens, features), or `tiled` like torch.cat([first, second]).
    """

    dim: int = 0
    parts: int = 1
    tiled: bool = False

    def by_row(self, tensor: Tensor, rows: int) -> Tensor:
        """`tensor` as (rows, *row_sizes)."""
        if self.tiled:
            return tensor.reshape(self.parts, rows, *tensor.shape[1:]).transpose(0, 1)
        if self.dim:
            return tensor.transpose(0, 1)
        return tensor if self.parts == 1 else tensor.reshape(rows, self.parts, *tensor.shape[1:])

    def back(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The reverse of `by_row`, for a tensor of the original `shape`."""
        if self.dim or self.tiled:
            tensor = tensor.transpose(0, 1)
        return tensor.reshape(shape) if self.parts > 1 else tensor

    def row_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one row."""
        if self.dim:
            return (shape[0], *shape[2:])
        return tuple(shape[1:]) if self.parts == 1 else (self.parts, *shape[1:])


def find_layout(shape: Sequence[int], rows: int, batch_dim: int | None, activation: bool) -> Layout | None:
    """Where the rows of the micro-batch are in a draw of this shape; None if it does not belong to them.

    `batch_dim` is what the model declares or its layers show. `activation` says that the shape is that of a computed
    tensor, which may have the rows flattened together with the next dimension, as (rows * tokens, features).
    """
    dims = len(shape)
    second = dims > 1 and shape[1] == rows
    if second and dims > 2 and batch_dim == 1:
        return Layout(dim=1)
    if dims and shape[0] == rows:
        scalar = rows == 1 and dims == 1 and not activation  # torch.rand(1) is one number for all rows
        return None if scalar else Layout()
    if second and (dims > 2 or batch_dim == 1):
        return Layout(dim=1)
    if activation and dims and shape[0] and shape[0] % rows == 0:
        return Layout(parts=shape[0] // rows)
    return None


class KeyedDraws(TorchFunctionMode):
    """Replaces the random numbers that torch functions draw, while it is entered."""

    def __init__(self, warn: Warn) -> None:
        super().__init__()
        self.batch_dim: int | None = None
        self.attention_limit = math.inf  # bytes that the attention weights of one layer may take
        self.draws = 0  # of this micro-batch, also those of compiled graphs
        self._warn = warn
        self._keys: dict[torch.device, Tensor] = {}
        self._step_keys: dict[torch.device, Tensor] = {}
        self._rows = self._step_key = self._fused_seed = 0
        self._count = 0
        self._numbers: dict[int, int] = {}
        self._tiled: set[int] = set()
        self._shared_lines: dict[tuple[object, int], int] = {}  # size of the first dimension by line of code

    @property
    def distinct_draws(self) -> int:
        """How many draws this micro-batch has made, each counted once however often it was computed."""
        return len(self._numbers)

    @property
    def key_devices(self) -> Sequence[torch.device]:
        """Where the keys of the current micro-batch are; the first is the device of the run."""
        return list(self._keys)

    def begin(self, keys: Tensor, step_key: int, fused_seed: int) -> None:
        """Start a micro-batch: `keys` of its rows, the key of its step, and a seed that belongs to it alone."""
        self._keys, self._step_keys = {keys.device: keys}, {}
        self._rows, self._step_key, self._fused_seed = len(keys), step_key, fused_seed
        self._count, self._numbers, self.draws, self._tiled = 0, {}, 0, set()
        torch.default_generator.manual_seed(step_key)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, kwargs or {})

    # Draws

    def number(self) -> int:
        """The number of the draw that starts now; a layer that is computed again gets its numbers again."""
        self.draws += 1
        if torch.compiler.is_compiling():  # a graph keeps its numbers
            self._count += 1
            return self._count
        marker = int(torch.randint(1 << 62, (), generator=torch.default_generator))
        known = self._numbers.get(marker)
        if known is None:
            self._count += 1
            known = self._numbers[marker] = self._count
        return known

    def keys(self, device: torch.device) -> Tensor:
        """The keys of the rows, on `device`."""
        if device not in self._keys:
            self._keys[device] = next(iter(self._keys.values())).to(device)
        return self._keys[device]

    def layout(self, shape: Sequence[int], like: Tensor | None) -> Layout | None:
        """Where the rows are in a draw of this shape; None for a draw that all ranks share, such as noise on weights."""
        if isinstance(like, nn.Parameter):
            return None
        layout = find_layout(shape, self._rows, self.batch_dim, activation=like is not None)
        if shape and shape[0] in self._tiled and (layout is None or layout.parts > 1):
            return Layout(parts=shape[0] // self._rows, tiled=True)
        if like is None and shape and not torch.compiler.is_compiling():
            return self._settle(shape[0], layout)
        return layout

    def note_tiled(self, result: Tensor) -> None:
        """Remember that tensors of this size are the rows several times over, one copy after the other."""
        if result.dim() and result.shape[0] > self._rows and result.shape[0] % self._rows == 0:
            self._tiled.add(result.shape[0])

    def _settle(self, size: int, layout: Layout | None) -> Layout | None:
        """Use what is known of a line of code that has no tensor to go by: torch.rand(3) is not one number per row.

        A line whose size once differed from the number of rows draws for all rows, also if the two agree later.
        """
        line = _calling_line()
        if layout is None:
            known = self._shared_lines.setdefault(line, size)
            if known != size:
                self.warn(
                    f"size {line}",
                    f"a draw with {size} entries in its first dimension is not one per row of this micro-batch of "
                    f"{self._rows}, and had {known} entries before: if the size follows the micro-batch, the numbers "
                    "depend on the number of ranks; draw with the rows in the first dimension",
                )
            return None
        return None if self._shared_lines.get(line) == size else layout

    def fill(self, draw: Draw, shape: Sequence[int], device: torch.device, like: Tensor | None = None) -> Tensor:
        """What `draw` gives for this shape: for each row of the micro-batch from its key, otherwise from the step's."""
        layout, number = self.layout(shape, like), self.number()
        if layout is None:
            return draw(self._shared_key(device), shape, number)[0]
        return layout.back(draw(self.keys(device), layout.row_sizes(shape), number), shape)

    def drop(self, tensor: Tensor, p: float) -> Tensor:
        """Dropout of `tensor`, keyed."""
        layout, number = self.layout(tensor.shape, tensor), self.number()
        if layout is None:
            return dropout(tensor.unsqueeze(0), self._shared_key(tensor.device), number, p)[0]
        if layout == Layout():
            return dropout(tensor, self.keys(tensor.device), number, p)
        return layout.back(
            dropout(layout.by_row(tensor, self._rows), self.keys(tensor.device), number, p), tensor.shape
        )

    def by_generators(
        self, draw: Callable[[Tensor | None, Sequence[int], torch.Generator], Tensor], shape: Sequence[int],
        device: torch.device, like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """A draw without a formula of its own: torch's function for each row, with a generator seeded by its key."""
        layout, number = self.layout(shape, like), self.number()
        keys = self.keys(device) if layout is not None else self._shared_key(device)
        seeds = uniform(keys, (2,), number, torch.float32).double().mul_(1 << 24).long().tolist()
        generators = [torch.Generator(device).manual_seed(high << 24 | low) for high, low in seeds]
        if layout is None:
            return draw(like, shape, generators[0])
        sizes = layout.row_sizes(shape)
        rows = [None] * self._rows if like is None else layout.by_row(like, self._rows)
        drawn = [draw(row, sizes, generator) for row, generator in zip(rows, generators, strict=True)]
        return layout.back(torch.stack(drawn), shape) if drawn[0].shape == sizes else torch.stack(drawn)

    def fused(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """A kernel that draws by itself: seeded, but by the micro-batch of this rank and not by its samples."""
        seed = (self._fused_seed + self.number() * 0x9E3779B97F4A7C15) % (1 << 63)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return func(*args, **kwargs)

    def warn(self, topic: str, text: str) -> None:
        """Warn once per topic, with the place in the user's code."""
        self._warn(topic, text)

    def _shared_key(self, device: torch.device) -> Tensor:
        if device not in self._step_keys:
            self._step_keys[device] = torch.tensor([self._step_key], device=device)
        return self._step_keys[device]


def _calling_line() -> tuple[object, int]:
    """The line that called a torch function, as (code, line number)."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


# Rules: what to do instead of a torch function. `args` and `kwargs` are those of the function.

_Rule = Callable[[KeyedDraws, Any, tuple[Any, ...], dict[str, Any]], Any]


def _own_generator(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A draw with the user's own generator: leave it, and say what it means."""
    mode.warn(
        f"generator {getattr(func, '__name__', func)}",
        f"{getattr(func, '__name__', func)}(generator=...) draws from a generator of your own inside a step, so the "
        "numbers of a sample depend on the number of ranks: omit generator=, and samestep keys the draw by sample, or "
        "use step.random, step.normal or step.rng(row)",
    )
    return func(*args, **kwargs)


def _drawing(rule: Callable[..., Any]) -> _Rule:
    """A rule with the signature of the torch function, for calls without a generator of the user and without `out`."""

    def apply(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            return kwargs["out"].copy_(apply(mode, func, args, {k: v for k, v in kwargs.items() if k != "out"}))
        if kwargs.get("generator") is not None:
            return _own_generator(mode, func, args, kwargs)
        return rule(mode, func, *args, **{k: v for k, v in kwargs.items() if k != "generator"})

    return apply


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape given as rand(2, 3) or rand((2, 3))."""
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int | torch.SymInt) else tuple(size)


def _finish(values: Tensor, requires_grad: bool) -> Tensor:
    return values.requires_grad_() if requires_grad else values


def _factory(draw: Callable[..., Tensor]) -> _Rule:
    def rule(
        mode: KeyedDraws, func: Any, *size: Any, dtype: torch.dtype | None = None, device: Any = None,
        requires_grad: bool = False, layout: Any = None, pin_memory: bool = False, names: Any = None,
    ) -> Tensor:  # fmt: skip
        del func, layout, pin_memory, names
        where, dtype = _device(device), dtype or torch.get_default_dtype()
        values = mode.fill(lambda keys, sizes, number: draw(keys, sizes, number, dtype), _sizes(size), where)
        return _finish(values, requires_grad)

    return _drawing(rule)


def _device(device: Any) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _like(draw: Callable[..., Tensor]) -> _Rule:
    def rule(
        mode: KeyedDraws, func: Any, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None,
        requires_grad: bool = False, layout: Any = None, memory_format: Any = None, pin_memory: bool = False,
    ) -> Tensor:  # fmt: skip
        del func, layout, memory_format, pin_memory
        kind, where = dtype or input.dtype, input.device if device is None else torch.device(device)
        values = mode.fill(lambda keys, sizes, number: draw(keys, sizes, number, kind), input.shape, where, input)
        return _finish(values, requires_grad)

    return _drawing(rule)


def _uniform_(mode: KeyedDraws, _: Any, input: Tensor, from_: float = 0.0, to: float = 1.0, **names: float) -> Tensor:
    low = names.get("from", from_)
    values = mode.fill(lambda *key: uniform(*key, input.dtype), input.shape, input.device, input)
    return input.copy_(values.mul_(to - low).add_(low))


def _normal_(mode: KeyedDraws, _: Any, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    values = mode.fill(lambda *key: normal(*key, input.dtype), input.shape, input.device, input)
    return input.copy_(values.mul_(std).add_(mean))


def _normal(
    mode: KeyedDraws, _: Any, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None,
    requires_grad: bool = False, layout: Any = None, pin_memory: bool = False,
) -> Tensor:  # fmt: skip
    del layout, pin_memory
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    like = max(tensors, key=Tensor.numel) if tensors else None
    if like is None:
        shape, kind, where = tuple(size), dtype or torch.get_default_dtype(), _device(device)
    else:
        shape, kind, where = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)), like.dtype, like.device
    values = mode.fill(lambda *key: normal(*key, kind), shape, where, like)
    return _finish(values * std + mean, requires_grad)


def _exponential_(mode: KeyedDraws, _: Any, input: Tensor, lambd: float = 1.0) -> Tensor:
    values = mode.fill(lambda *key: _exponential(*key, input.dtype), input.shape, input.device, input)
    return input.copy_(values.div_(lambd))


def _exponential(keys: Tensor, sizes: Sequence[int], number: int, dtype: torch.dtype) -> Tensor:
    # in the middle of its step of 2**-24: neither 0 nor 1, whose logarithms are -inf and 0
    middle = uniform(keys, sizes, number).double().add_(2.0**-25)
    return middle.log_().neg_().to(dtype)


def _bernoulli(mode: KeyedDraws, _: Any, input: Tensor, p: float | None = None) -> Tensor:
    probability = input if p is None else p
    return (_uniforms(mode, input) < probability).to(input.dtype)


def _bernoulli_(mode: KeyedDraws, _: Any, input: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return input.copy_(_uniforms(mode, input) < p)


def _uniforms(mode: KeyedDraws, like: Tensor) -> Tensor:
    return mode.fill(lambda *key: uniform(*key), like.shape, like.device, like)


def _dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return func(input, p, training, inplace) if inplace else func(input, p, training)
    dropped = mode.drop(input, p)
    return input.copy_(dropped) if inplace else dropped


def _dropout_(mode: KeyedDraws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return input.copy_(mode.drop(input, p)) if train and p else func(input, p, train)


def _native_dropout(mode: KeyedDraws, func: Any, input: Tensor, p: float, train: bool | None) -> Any:
    if not train or not p:
        return func(input, p, train)
    kept = mode.drop(torch.ones_like(input), p)
    return input * kept, kept != 0


def _feature_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout of whole channels."""
    batched = input.dim() > 2 or func not in (functional.dropout1d, functional.dropout3d)
    if not training or not p or not batched:
        return func(input, p, training, inplace) if inplace else func(input, p, training)
    noise = mode.drop(_ones_per_channel(input), p)
    return input.mul_(noise) if inplace else input * noise


def _ones_per_channel(input: Tensor) -> Tensor:
    return input.new_ones(*input.shape[:2], *[1] * (input.dim() - 2))


def _alpha_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout that keeps mean and variance of SELU activations: a dropped value becomes SELU's lower limit."""
    if not training or not p:
        return func(input, p, training, inplace) if inplace else func(input, p, training)
    by_channel = func in (functional.feature_alpha_dropout, torch.feature_alpha_dropout)
    ones = _ones_per_channel(input) if by_channel else torch.ones_like(input)
    kept = (mode.drop(ones, p) != 0).to(input.dtype)
    limit = -1.7580993408473766  # of SELU: -scale * alpha
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * limit**2))
    result = (input * kept + limit * (1 - kept)) * scale - scale * limit * p
    return input.copy_(result) if inplace else result


def _rrelu(
    mode: KeyedDraws, func: Any, input: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training:
        return func(input, lower, upper, training, inplace) if inplace else func(input, lower, upper, training)
    slopes = _uniforms(mode, input).to(input.dtype) * (upper - lower) + lower
    result = torch.where(input < 0, input * slopes, input)
    return input.copy_(result) if inplace else result


def _by_rows(mode: KeyedDraws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of a tensor without a formula above, such as poisson or multinomial."""

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        return func(row, *args, generator=generator, **kwargs)

    return mode.by_generators(draw, input.shape, input.device, input)


def _by_rows_(mode: KeyedDraws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function that fills a tensor, such as random_ or cauchy_."""

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        assert row is not None
        return func(row.clone(), *args, generator=generator, **kwargs)

    return input.copy_(mode.by_generators(draw, input.shape, input.device, input.detach()))


def _randint(
    mode: KeyedDraws, _: Any, *args: Any, low: int = 0, high: int | None = None, size: Any = None,
    dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False, **unused: Any,
) -> Tensor:  # fmt: skip
    del requires_grad, unused  # integers have no gradient
    if args and not isinstance(args[-1], int):
        *args, size = args
    low, high = (args if len(args) == 2 else (low, args[0])) if args else (low, high)
    bounds = int(low), int(high)  # pyright: ignore[reportArgumentType]  # torch requires it

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randint(*bounds, tuple(sizes), dtype=dtype or torch.int64, device=device, generator=generator)

    return mode.by_generators(draw, tuple(size), _device(device))


def _randint_like(mode: KeyedDraws, _: Any, input: Tensor, *args: int, **kwargs: Any) -> Tensor:
    low, high = (kwargs.get("low", 0), kwargs.get("high")) if not args else ((0, *args) if len(args) == 1 else args)

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        kind = kwargs.get("dtype") or input.dtype
        return torch.randint(low, high, tuple(sizes), dtype=kind, device=input.device, generator=generator)  # pyright: ignore[reportArgumentType]

    return mode.by_generators(draw, input.shape, input.device, input)


def _randperm(mode: KeyedDraws, _: Any, n: int, **kwargs: Any) -> Tensor:
    if n == mode.keys(torch.device("cpu")).numel() and n > 1:
        mode.warn(
            "randperm",
            f"torch.randperm({n}) permutes the rows of the micro-batch, which couples its samples, so the result "
            "depends on the number of ranks and on micro_batch: permute the dataset instead, or draw a partner per "
            "sample in the dataset",
        )
    device = _device(kwargs.get("device"))
    return mode.by_generators(
        lambda row, sizes, generator: torch.randperm(n, generator=generator, **kwargs), (), device
    )


def _attention(
    mode: KeyedDraws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout: fused kernels draw by themselves, so the weights are computed and dropped by sample."""
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not dropout_p:
        return func(query, key, value, **options)
    weights_bytes = query.shape[:-1].numel() * key.shape[-2] * (query.element_size() + 4)
    if weights_bytes > mode.attention_limit:
        mode.warn(
            "attention",
            f"scaled_dot_product_attention(dropout_p={dropout_p:g}) computes in a fused kernel, since its attention "
            f"weights of {weights_bytes / 2**30:.1f} GiB per layer do not fit into the free memory: its dropout mask "
            "depends on the number of ranks and on micro_batch; everything else is keyed by sample. Pass a smaller "
            "micro_batch=, or turn attention dropout off",
        )
        return mode.fused(func, (query, key, value), {**options, "dropout_p": dropout_p}, query.device)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return mode.drop(scores.softmax(-1).to(value.dtype), dropout_p) @ value


def _recurrent(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An RNN with dropout between its layers: one layer at a time, with keyed dropout between them."""
    if (
        kwargs or len(args) != 9 or isinstance(args[3], Tensor | list | tuple)
    ):  # a packed sequence: args[1] are batch sizes
        return _packed_recurrent(mode, func, args, kwargs)
    data, state, weights, biases, layers, p, train, bidirectional, batch_first = args
    if not train or not p or layers < 2:
        return func(*args)
    directions, per_layer = 1 + bool(bidirectional), len(weights) // layers
    lstm, before, finals = not isinstance(state, Tensor), mode.batch_dim, list[Any]()
    mode.batch_dim = None if batch_first else 1
    try:
        for layer in range(layers):
            own = slice(layer * directions, (layer + 1) * directions)
            start = tuple(part[own].contiguous() for part in state) if lstm else state[own].contiguous()
            chosen = weights[layer * per_layer : (layer + 1) * per_layer]
            data, *final = func(data, start, chosen, biases, 1, 0.0, train, bidirectional, batch_first)
            finals.append(final)
            if layer < layers - 1:
                data = mode.drop(data, p)
    finally:
        mode.batch_dim = before
    return data, *(torch.cat(parts) for parts in zip(*finals, strict=True))


def _packed_recurrent(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data, train = args[0], bool(args[7]) if len(args) > 7 else True
    p = float(args[6]) if len(args) > 6 else 0.0
    if not train or not p or int(args[5]) < 2:
        return func(*args, **kwargs)
    mode.warn(
        "packed",
        f"a recurrent layer with dropout={p:g} between its layers got a packed sequence, whose rows samestep cannot "
        "assign to samples: its dropout mask depends on the number of ranks; pass padded sequences, or one nn.LSTM or "
        "nn.GRU per layer with nn.Dropout in between",
    )
    return mode.fused(func, args, kwargs, data.device)


def _tiling(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that puts copies of the rows one after the other, such as torch.cat([first, second])."""
    result = func(*args, **kwargs)
    mode.note_tiled(result)
    return result


def _entered(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Python function of torch that draws inside, or a backward pass, which computes checkpointed layers again."""
    with mode:
        return without_override_check(func)(*args, **kwargs)


_RULES: Final[dict[Any, _Rule]] = {
    torch.rand: _factory(uniform),
    torch.randn: _factory(normal),
    torch.rand_like: _like(uniform),
    torch.randn_like: _like(normal),
    torch.randint: _drawing(_randint),
    torch.randint_like: _drawing(_randint_like),
    torch.randperm: _drawing(_randperm),
    torch.normal: _drawing(_normal),
    torch.bernoulli: _drawing(_bernoulli),
    Tensor.bernoulli: _drawing(_bernoulli),
    Tensor.bernoulli_: _drawing(_bernoulli_),
    Tensor.uniform_: _drawing(_uniform_),
    Tensor.normal_: _drawing(_normal_),
    Tensor.exponential_: _drawing(_exponential_),
    **dict.fromkeys(
        (torch.cat, torch.concat, torch.concatenate, torch.vstack, torch.tile, Tensor.tile, Tensor.repeat), _tiling
    ),
    functional.rrelu: _drawing(_rrelu),
    functional.scaled_dot_product_attention: _drawing(_attention),
    functional.multi_head_attention_forward: _entered,
    functional.gumbel_softmax: _entered,
    torch.autograd.grad: _entered,
    torch.autograd.backward: _entered,
    Tensor.backward: _entered,
    **dict.fromkeys((functional.dropout, torch.dropout), _drawing(_dropout)),
    torch.dropout_: _drawing(_dropout_),
    torch.native_dropout: _drawing(_native_dropout),
    **dict.fromkeys(
        (functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout),
        _drawing(_feature_dropout),
    ),
    **dict.fromkeys(
        (functional.alpha_dropout, torch.alpha_dropout, functional.feature_alpha_dropout, torch.feature_alpha_dropout),
        _drawing(_alpha_dropout),
    ),
    **dict.fromkeys((torch.poisson, torch.binomial, torch.multinomial, Tensor.multinomial), _drawing(_by_rows)),
    **dict.fromkeys((Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_), _drawing(_by_rows_)),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
