"""What happens instead of each torch function that draws, while `KeyedDraws` is entered.

A rule takes the mode, the function and its arguments. Functions with a simple formula are computed from keyed uniform
or normal numbers. For the others torch's function runs once per row, with a generator seeded by the key of the row.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from samestep.data.sample_rng import SampleGenerator, normal, uniform
from samestep.parallel.keyed_draws import Draw, KeyedDraws, RowCount, Rule
from samestep.torch_private import GAMMA_DRAWS, without_override_check


def _own_generator(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A draw with a generator of the user: leave it, and say what it means if there is one number per row."""
    result = func(*args, **kwargs)
    known = isinstance(kwargs["generator"], SampleGenerator)
    if not known and isinstance(result, Tensor) and mode.may_have_rows(result.shape):
        name = getattr(func, "__name__", func)
        mode.warn(
            f"generator {name}",
            f"{name}(generator=...) draws for the rows of a micro-batch from a generator of your own, so the numbers "
            "of a sample depend on the number of ranks: omit generator=, and samestep keys the draw by sample, or use "
            "step.random, step.normal or step.rng(row)",
        )
    return result


def _drawing(rule: Callable[..., Any]) -> Rule:
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


def _of(draw: Callable[..., Tensor], dtype: torch.dtype) -> Draw:
    return lambda keys, sizes, number: draw(keys, sizes, number, dtype)


def _finish(values: Tensor, requires_grad: bool) -> Tensor:
    return values.requires_grad_() if requires_grad else values


def _factory(draw: Callable[..., Tensor]) -> Rule:
    def rule(
        mode: KeyedDraws, func: Any, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None,
        device: Any = None, requires_grad: bool = False, **unused: Any,
    ) -> Tensor:  # fmt: skip
        del func, unused  # layout and the like
        where, dtype = _device(mode, device), dtype or torch.get_default_dtype()
        values = mode.fill(_of(draw, dtype), _sizes(sizes) if size is None else tuple(size), where)
        return _finish(values, requires_grad)

    return _drawing(rule)


def _device(mode: KeyedDraws, device: Any) -> torch.device:
    return mode.default_device if device is None else torch.device(device)


def _like(draw: Callable[..., Tensor]) -> Rule:
    def rule(
        mode: KeyedDraws, func: Any, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None,
        requires_grad: bool = False, layout: Any = None, memory_format: Any = None, pin_memory: bool = False,
    ) -> Tensor:  # fmt: skip
        del func, layout, memory_format, pin_memory
        kind, where = dtype or input.dtype, input.device if device is None else torch.device(device)
        values = mode.fill(_of(draw, kind), input.shape, where, input)
        return _finish(values, requires_grad)

    return _drawing(rule)


def _uniform_(mode: KeyedDraws, _: Any, input: Tensor, from_: float = 0.0, to: float = 1.0, **names: float) -> Tensor:
    low = names.get("from", from_)
    values = mode.fill(_of(uniform, input.dtype), input.shape, input.device, input, fresh=True)
    return input.copy_(values.mul_(to - low).add_(low))


def _normal_(mode: KeyedDraws, _: Any, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    values = mode.fill(_of(normal, input.dtype), input.shape, input.device, input, fresh=True)
    return input.copy_(values.mul_(std).add_(mean))


def _normal(
    mode: KeyedDraws, _: Any, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None,
    requires_grad: bool = False, layout: Any = None, pin_memory: bool = False,
) -> Tensor:  # fmt: skip
    del layout, pin_memory
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    like = tensors[0] if tensors else None
    if len(tensors) == 2 and tensors[1].numel() > tensors[0].numel():
        like = tensors[1]
    if like is None:
        shape, kind, where = tuple(size), dtype or torch.get_default_dtype(), _device(mode, device)
    else:
        shape, kind, where = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)), like.dtype, like.device
    values = mode.fill(_of(normal, kind), shape, where, like, more_dims=True)  # torch.distributions add dimensions
    return _finish(values * std + mean, requires_grad)


def _exponential_(mode: KeyedDraws, _: Any, input: Tensor, lambd: float = 1.0) -> Tensor:
    values = mode.fill(_of(_exponential, input.dtype), input.shape, input.device, input, fresh=True)
    return input.copy_(values.div_(lambd))


def _exponential(keys: Tensor, sizes: Sequence[int], number: int, dtype: torch.dtype) -> Tensor:
    # in the middle of its step of 2**-24: neither 0 nor 1, whose logarithms are -inf and 0
    middle = uniform(keys, sizes, number).double().add_(2.0**-25)
    return middle.log_().neg_().to(dtype)


def _bernoulli(mode: KeyedDraws, _: Any, input: Tensor, p: float | None = None) -> Tensor:
    probability = input if p is None else p
    return (_uniforms(mode, input, fresh=not input.requires_grad) < probability).to(input.dtype)


def _bernoulli_(mode: KeyedDraws, _: Any, input: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return input.copy_(_uniforms(mode, input, fresh=True) < p)


def _uniforms(mode: KeyedDraws, like: Tensor, fresh: bool = False) -> Tensor:
    return mode.fill(_of(uniform, torch.float32), like.shape, like.device, like, fresh)


def _dropping(drop: Callable[[KeyedDraws, Any, Tensor, float], Tensor | None]) -> Rule:
    """A variant of dropout; torch.dropout says `train` for `training`, and torch.dropout_ works in place."""

    def rule(
        mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool | None = None,
        inplace: bool = False, train: bool | None = None,
    ) -> Tensor:  # fmt: skip
        by_default = func not in (functional.alpha_dropout, functional.feature_alpha_dropout)
        active = next((each for each in (training, train) if each is not None), by_default)
        dropped = drop(mode, func, input, p) if active and p else None
        if dropped is None:
            return func(input, p, active, inplace) if inplace else func(input, p, active)
        return input.copy_(dropped) if inplace or func in _IN_PLACE else dropped

    return _drawing(rule)


def _dropout(mode: KeyedDraws, _: Any, input: Tensor, p: float) -> Tensor:
    return mode.drop(input, p)


def _native_dropout(mode: KeyedDraws, func: Any, input: Tensor, p: float, train: bool | None) -> Any:
    if not train or not p:
        return func(input, p, train)
    kept = mode.drop(torch.ones_like(input), p)
    return input * kept, kept != 0


def _feature_dropout(mode: KeyedDraws, func: Any, input: Tensor, p: float) -> Tensor | None:
    """Dropout of whole channels."""
    batched = input.dim() > 2 or func not in (functional.dropout1d, functional.dropout3d)
    with mode.rows_in(0):
        return input * mode.drop(_ones_per_channel(input), p) if batched else None


def _ones_per_channel(input: Tensor) -> Tensor:
    return input.new_ones(*input.shape[:2], *[1] * (input.dim() - 2))


def _alpha_dropout(mode: KeyedDraws, func: Any, input: Tensor, p: float) -> Tensor:
    """Dropout that keeps mean and variance of SELU activations: a dropped value becomes SELU's lower limit."""
    by_channel = "feature" in func.__name__
    ones = _ones_per_channel(input) if by_channel else torch.ones_like(input)
    kept = (mode.drop(ones, p) != 0).to(input.dtype)
    limit = -1.7580993408473766  # of SELU: -scale * alpha
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * limit**2))
    return (input * kept + limit * (1 - kept)) * scale - scale * limit * p


def _rrelu(
    mode: KeyedDraws, func: Any, input: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training:
        return func(input, lower, upper, training, inplace) if inplace else func(input, lower, upper, training)
    slopes = _uniforms(mode, input).to(input.dtype) * (upper - lower) + lower
    result = torch.where(input < 0, input * slopes, input)
    return input.copy_(result) if inplace or func in _IN_PLACE else result


def _by_rows(mode: KeyedDraws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of a tensor without a formula above, such as poisson or multinomial."""

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        return func(row, *args, generator=generator, **kwargs)

    return mode.by_generators(draw, input.shape, input.device, input)


def _binomial(mode: KeyedDraws, func: Any, count: Tensor, prob: Tensor) -> Tensor:
    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        assert row is not None
        return func(row[..., 0], row[..., 1], generator=generator)

    return mode.by_generators(draw, count.shape, count.device, torch.stack((count, prob), dim=-1))


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
        args, size = args[:-1], args[-1]
    if args:
        low, high = args if len(args) == 2 else (low, args[0])
    assert high is not None  # torch requires it
    first, end, kind = int(low), int(high), dtype or torch.int64

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randint(first, end, tuple(sizes), dtype=kind, device=device, generator=generator)

    return mode.by_generators(draw, tuple(size), _device(mode, device))


def _randint_like(mode: KeyedDraws, _: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = args if len(args) == 2 else (kwargs.get("low", 0), args[0] if args else kwargs["high"])
    first, end, kind = int(low), int(high), kwargs.get("dtype") or input.dtype

    def draw(row: Tensor | None, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randint(first, end, tuple(sizes), dtype=kind, device=input.device, generator=generator)

    return mode.by_generators(draw, input.shape, input.device, input)


def _randperm(mode: KeyedDraws, _: Any, n: int, **kwargs: Any) -> Tensor:
    if n == mode.keys(torch.device("cpu")).numel() and n > 1:
        mode.warn(
            "randperm",
            f"torch.randperm({n}) permutes the rows of the micro-batch, which couples its samples, so the result "
            "depends on the number of ranks and on micro_batch: permute the dataset instead, or draw a partner per "
            "sample in the dataset",
        )
    device = _device(mode, kwargs.get("device"))
    return mode.by_generators(
        lambda row, sizes, generator: torch.randperm(n, generator=generator, **kwargs), (), device
    )


def _reordering(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Flip and roll: along the rows they couple samples, as in mixup."""
    tensor = kwargs["input"] if "input" in kwargs else args[0]
    given = args[1:] if func in _FLIPS else args[2:]  # flip(dims) and roll(shifts, dims)
    dims = _sizes((kwargs["dims"],) if "dims" in kwargs else given) if given or "dims" in kwargs else ()
    along_rows = any(dim % max(tensor.dim(), 1) == 0 for dim in dims) or not dims
    if along_rows and tensor.dim() and mode.may_have_rows(tensor.shape[:1]) and not mode.single_row:
        name = getattr(func, "__name__", func)
        mode.warn(
            f"reorder {name}",
            f"{name}() reorders the {tensor.shape[0]} rows of the micro-batch, which couples its samples, so the "
            "result depends on the number of ranks and on micro_batch: choose the partner of a sample in the dataset",
        )
    return func(*args, **kwargs)


def _attention(
    mode: KeyedDraws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout: fused kernels draw by themselves, so the weights are computed and dropped by sample."""
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not dropout_p:
        return func(query, key, value, **options)
    weights_bytes = query.shape[:-1].numel() * key.shape[-2] * (query.element_size() + 4)
    if not mode.attention_fits(weights_bytes):
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
    with mode.rows_in(0):
        return mode.drop(scores.softmax(-1).to(value.dtype), dropout_p) @ value


def _recurrent(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An RNN with dropout between its layers: one layer at a time, with keyed dropout between them."""
    if len(args) != 9:
        return func(*args, **kwargs)
    if isinstance(args[3], list | tuple):  # a packed sequence, with its batch sizes before the state
        return _packed_recurrent(mode, func, args, kwargs)
    data, state, weights, biases, layers, p, train, bidirectional, batch_first = args
    if not train or not p or layers < 2:
        return func(*args)
    directions, per_layer = 1 + bool(bidirectional), len(weights) // layers
    lstm, finals = not isinstance(state, Tensor), list[Any]()
    with mode.rows_in(0 if batch_first else 1):
        for layer in range(layers):
            own = slice(layer * directions, (layer + 1) * directions)
            start = tuple(part[own].contiguous() for part in state) if lstm else state[own].contiguous()
            chosen = weights[layer * per_layer : (layer + 1) * per_layer]
            data, *final = _one_layer(func, data, start, chosen, biases, 1, 0.0, train, bidirectional, batch_first)
            finals.append(final)
            if layer < layers - 1:
                data = mode.drop(data, p)
    return data, *(torch.cat(parts) for parts in zip(*finals, strict=True))


def _one_layer(func: Any, data: Tensor, *args: Any) -> Any:
    if not data.is_cuda:
        return func(data, *args)
    with warnings.catch_warnings():  # cuDNN copies the weights of one layer into one chunk of memory, and says so
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        return func(data, *args)


def _packed_recurrent(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data, _, _, _, _, layers, p, train, _ = args
    if not train or not p or layers < 2:
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


def _shape(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.shape and Tensor.size: in a micro-batch of one row, mark the number of rows."""
    found = func(*args, **kwargs)
    if torch.compiler.is_compiling() or not mode.single_row:
        return found
    if isinstance(found, int):
        dim = kwargs["dim"] if kwargs else args[1]
        return RowCount(1) if found == 1 and dim == 0 else found
    return torch.Size([RowCount(1), *found[1:]]) if found and found[0] == 1 else found


def _length(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """len(x), which cannot be marked like x.shape[0]."""
    found = func(*args, **kwargs)
    if not torch.compiler.is_compiling() and mode.single_row and found == 1:
        mode.note_length()
    return found


def _creating(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A function that creates a tensor of a given size."""
    result = func(*args, **kwargs)
    if not torch.compiler.is_compiling() and mode.single_row:
        sizes = next((value for value in (kwargs.get("size"), *args) if isinstance(value, list | tuple)), args)
        mode.note_size(result, sizes)
    return result


def _entered(function: Callable[..., Any]) -> Rule:
    """A Python function of torch that draws inside."""
    unchecked = without_override_check(function)

    def rule(mode: KeyedDraws, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return unchecked(*args, **kwargs)

    return rule


def _backward(function: Callable[..., Any]) -> Rule:
    """A backward pass, which computes checkpointed layers again."""
    entered = _entered(function)

    def rule(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode.recomputing():
            return entered(mode, func, args, kwargs)

    return rule


def _batch_first(function: Callable[..., Any]) -> Rule:
    """The same for a function that draws for tensors with the rows in the first dimension, whatever its inputs have."""
    entered = _entered(function)

    def rule(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode.rows_in(0):
            return entered(mode, func, args, kwargs)

    return rule


def _without_indices(function: Callable[..., Any]) -> Rule:
    """Pooling that returns the values only; torch implements it by the function that returns indices too."""
    entered = _entered(function)

    def rule(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return entered(mode, func, args, kwargs)[0]

    return rule


_FLIPS: Final = (torch.flip, Tensor.flip)
_CATS: Final = (torch.cat, torch.concat, torch.concatenate, torch.vstack, torch.stack)
_TILES: Final = (*_CATS, torch.tile, Tensor.tile, Tensor.repeat, Tensor.expand)
_NEW: Final = (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
_CHANNELS: Final = (functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout)
_ALPHA: Final = (functional.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_)
_ALPHA_CHANNELS: Final = (
    functional.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_
)  # fmt: skip
_IN_PLACE: Final = (
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_, torch.rrelu_
)  # fmt: skip
DRAW_RULES: Final[dict[Any, Rule]] = {
    torch.rand: _factory(uniform),
    torch.randn: _factory(normal),
    torch.rand_like: _like(uniform),
    torch.randn_like: _like(normal),
    torch.randint: _drawing(_randint),
    torch.randint_like: _drawing(_randint_like),
    torch.randperm: _drawing(_randperm),
    torch.normal: _drawing(_normal),
    torch.binomial: _drawing(_binomial),
    torch.bernoulli: _drawing(_bernoulli),
    Tensor.bernoulli: _drawing(_bernoulli),
    Tensor.bernoulli_: _drawing(_bernoulli_),
    Tensor.uniform_: _drawing(_uniform_),
    Tensor.normal_: _drawing(_normal_),
    Tensor.exponential_: _drawing(_exponential_),
    **dict.fromkeys(_TILES, _tiling),
    Tensor.__len__: _length,
    **dict.fromkeys((*_FLIPS, torch.roll, Tensor.roll), _reordering),
    **dict.fromkeys((Tensor.shape.__get__, Tensor.size), _shape),  # pyright: ignore  # a property of torch
    **dict.fromkeys((torch.empty, torch.zeros, torch.ones, torch.full, *_NEW), _creating),
    **dict.fromkeys((functional.rrelu, torch.rrelu, torch.rrelu_), _drawing(_rrelu)),
    functional.scaled_dot_product_attention: _drawing(_attention),
    functional.multi_head_attention_forward: _batch_first(functional.multi_head_attention_forward),
    functional.gumbel_softmax: _entered(functional.gumbel_softmax),
    functional.fractional_max_pool2d: _without_indices(functional.fractional_max_pool2d_with_indices),
    functional.fractional_max_pool3d: _without_indices(functional.fractional_max_pool3d_with_indices),
    functional.fractional_max_pool2d_with_indices: _entered(functional.fractional_max_pool2d_with_indices),
    functional.fractional_max_pool3d_with_indices: _entered(functional.fractional_max_pool3d_with_indices),
    **{function: _backward(function) for function in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)},
    **dict.fromkeys((functional.dropout, torch.dropout, torch.dropout_), _dropping(_dropout)),
    torch.native_dropout: _drawing(_native_dropout),
    **dict.fromkeys((*_CHANNELS, torch.feature_dropout_), _dropping(_feature_dropout)),
    **dict.fromkeys((*_ALPHA, *_ALPHA_CHANNELS), _dropping(_alpha_dropout)),
    **dict.fromkeys((torch.poisson, torch.multinomial, Tensor.multinomial, *GAMMA_DRAWS), _drawing(_by_rows)),
    **dict.fromkeys((Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_), _drawing(_by_rows_)),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
