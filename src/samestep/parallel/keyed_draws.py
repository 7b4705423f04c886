"""Random numbers that a model draws, keyed by sample: the same on any number of ranks and any micro-batch size.

While a micro-batch is computed, `KeyedDraws` sees every call of a torch function. A draw with one slice per row of the
micro-batch, such as dropout of activations, is replaced by numbers from the keys of the rows (data/sample_rng.py) and
the number of the draw. Any other draw gets its numbers from the key of the step, so that all ranks draw the same.

The number of a draw is found by the state of torch's CPU generator, which each draw advances. Activation checkpointing
restores this state before it computes a layer again, so the layer draws the same numbers again.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.data.sample_rng import prepare_for_graphs, uniform
from samestep.messages import calling_frame
from samestep.parallel.keyed_dropout import dropout
from samestep.torch_private import dispatch_in_graphs, never_compile_alone, vmap_randomness

Warn = Callable[[str, str], None]
Draw = Callable[[Tensor, Sequence[int], int], Tensor]  # keys, sizes of one row, number of the draw
Rule = Callable[["KeyedDraws", Any, tuple[Any, ...], dict[str, Any]], Any]  # the mode, the function and its arguments

_SKIPPED_FILES = (__file__, str(Path(__file__).with_name("draw_rules.py")), str(Path(torch.__file__).parent))
# the attributes of KeyedDraws that belong to one micro-batch
_OF_A_BATCH = (
    "_keys",
    "_step_keys",
    "_rows",
    "_step_key",
    "_fused_seed",
    "_count",
    "_numbers",
    "_blocks",
    "draws",
    "_tiled",
    "shared",
)
_FROM_ROWS = "_samestep_from_rows"  # the attribute of a tensor that was created with the number of rows as a size


@dataclass(frozen=True)
class Layout:
    """Where the rows of the micro-batch are in a tensor: in dimension `dim`, with `parts` entries for each row.

    The entries of a row are neighbors, as in (rows * tokens, features), or `tiled` like torch.cat([first, second]).
    """

    dim: int = 0
    parts: int = 1
    tiled: bool = False

    @property
    def kind(self) -> str:
        """The layout without its sizes, in words."""
        return "second dimension" if self.dim else "first dimension" if self.parts == 1 else "first dimension, repeated"

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


def candidate_layouts(
    shape: Sequence[int], rows: int, batch_dim: int | None, activation: bool, tiled: bool
) -> list[Layout]:
    """Where the rows of the micro-batch may be in a draw of this shape, the most likely first; none if it has no rows.

    `batch_dim` is what the model declares or its layers show. `activation` says that the shape is that of a computed
    tensor, which may have the rows flattened together with the next dimension, as (rows * tokens, features), and
    `tiled` that copies of the rows were put one after the other before.
    """
    dims = len(shape)
    found: list[Layout] = []
    if dims and shape[0] == rows:
        found.append(Layout())
    if dims > 1 and shape[1] == rows and batch_dim != 0 and (dims > 2 or batch_dim == 1):
        found.insert(0 if batch_dim == 1 and dims > 2 else len(found), Layout(dim=1))
    if dims and shape[0] > rows and shape[0] % rows == 0 and (tiled or activation):
        found.append(Layout(parts=shape[0] // rows, tiled=tiled))
    return found


@dataclass
class _Site:
    """What is known of one place that draws: the kinds of layout that fit all its draws so far."""

    rows: int
    shape: tuple[int, ...]
    kinds: set[str]
    used: str | None  # the kind that was used last


class LayoutMemory:
    """Chooses between layouts by what earlier micro-batches of other sizes have shown.

    In a micro-batch of 64 rows, torch.rand(64) may be one number per row or a constant size. A micro-batch of another
    size tells. What was chosen before and turns out to be wrong is reported.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._sites: dict[object, _Site] = {}
        self._warn = warn

    def choose(self, key: object, rows: int, shape: tuple[int, ...], candidates: Sequence[Layout]) -> Layout | None:
        """The layout of a draw at the place `key`."""
        site = self._sites.get(key)
        if site is None:
            chosen = candidates[0] if candidates else None
            self._sites[key] = _Site(rows, shape, {c.kind for c in candidates}, chosen.kind if chosen else None)
            return chosen
        left = [candidate for candidate in candidates if candidate.kind in site.kinds]
        chosen = left[0] if left else None
        if rows == site.rows and site.kinds and not left and candidates:  # a branch with another layout
            return candidates[0]
        if rows != site.rows:
            self._learn(key, site, rows, shape, {candidate.kind for candidate in left}, chosen)
        elif not site.kinds and shape != site.shape:
            self._report_size(key, rows, shape, site.shape)
        return chosen

    def has_rows(self, key: object) -> bool | None:
        """Whether a place draws per row, as a micro-batch of several rows has shown; None if none has."""
        site = self._sites.get(key)
        return None if site is None or site.rows == 1 else bool(site.kinds)

    def _learn(
        self, key: object, site: _Site, rows: int, shape: tuple[int, ...], kinds: set[str], chosen: Layout | None
    ) -> None:
        kind = chosen.kind if chosen else None
        if site.used is not None and kind != site.used:
            self._warn(
                f"layout {key}",
                f"a draw of shape {shape} was treated as one with the rows in its {site.used}, and this micro-batch of "
                f"{rows} rows shows that it is not: the numbers of earlier steps depend on the number of ranks; if "
                "the batch is in dimension 1, pass run.wrap(model, batch_dim=1); if that size is a constant, pass a "
                "global_batch and a micro_batch that differ from it",
            )
        elif site.used is None and shape != site.shape:
            self._report_size(key, rows, shape, site.shape)
        site.rows, site.shape, site.kinds, site.used = rows, shape, kinds, kind

    def _report_size(self, key: object, rows: int, shape: tuple[int, ...], before: tuple[int, ...]) -> None:
        self._warn(
            f"size {key}",
            f"a draw of shape {shape} does not have the {rows} rows of the micro-batch in its first dimension, and "
            f"its shape was {before} before: its numbers are those of the step and not of the samples, so they may "
            "depend on the number of ranks; draw with the rows in the first dimension, then transpose or select",
        )


class RowCount(int):
    """The size 1 of a first dimension, read from a tensor in a micro-batch of one row.

    There `torch.rand(x.shape[0], 8)` is noise of the sample, and `torch.rand(1, 8)` is noise that all samples share.
    """


class KeyedDraws(TorchFunctionMode):
    """Replaces the random numbers that torch functions draw, while it is entered; draw_rules.py has the functions."""

    def __init__(self, rules: Mapping[Any, Rule], warn: Warn) -> None:
        super().__init__()
        self._rules = rules
        self._run_rule: Callable[..., Any] | None = None
        self.batch_dim: int | None = None
        self.attention_limit = math.inf  # bytes that the attention weights of all layers may take
        self._attention_calls = 0  # with dropout, in this micro-batch
        self.attention_layers = 1  # as many as the model or an earlier micro-batch has shown
        self.default_device = torch.device("cpu")  # of torch.rand and the like, since Dynamo cannot ask torch for it
        self.draws = 0  # of this micro-batch, also those of compiled graphs
        self._warn = warn
        self._keys: dict[torch.device, Tensor] = {}
        self._step_keys: dict[torch.device, Tensor] = {}
        self._rows = self._step_key = self._fused_seed = 0
        self._count = 0
        self._kind = ""
        self._numbers: dict[int, int] = {}
        self._blocks: dict[int, int] = {}  # how many draws came before each compiled block
        self._tiled: set[int] = set()
        self.shared: Counter[tuple[Any, int]] = Counter()  # draws of this micro-batch without rows, by place
        self._unclear: tuple[int, ...] | None = None  # the shape of a draw in a compiled graph that fits in two ways
        self._unclear_dim = 0  # the dimension that was chosen; -1 if other draws do not show whether that is right
        self._dims_in_graphs = 0  # a bit for each dimension in which activations of compiled graphs have their rows
        self.row_dims: set[int] = set()  # where activations have shown to have their rows
        self._batches = 0
        self._length_readers: set[object] = set()  # code of functions that called len() of a tensor with one row
        self._memory = LayoutMemory(self.warn)

    @property
    def distinct_draws(self) -> int:
        """How many draws this micro-batch has made, each counted once however often it was computed."""
        return len(self._numbers) + len(self._blocks)

    @property
    def key_devices(self) -> Sequence[torch.device]:
        """Where the keys of the current micro-batch are; the first is the device of the run."""
        return list(self._keys)

    def begin(self, keys: Tensor, step_key: int, fused_seed: int, first_number: int = 0, kind: str = "") -> None:
        """Start a micro-batch: `keys` of its rows, the key of its step, and a seed that belongs to it alone."""
        self._kind, self._unclear, self._dims_in_graphs = kind, None, 0
        self._batches += 1
        self.attention_layers, self._attention_calls = max(self.attention_layers, self._attention_calls), 0
        self._keys, self._step_keys = {keys.device: keys}, {}
        if self._run_rule is not None:  # for compiled graphs: they would specialize on a number, and compile every step
            self._step_keys[keys.device] = _filled(step_key, keys.device)
        self._rows, self._step_key, self._fused_seed = len(keys), step_key, fused_seed
        self._count, self._numbers, self._blocks, self.draws, self._tiled = first_number, {}, {}, 0, set()
        self.shared = Counter()
        torch.default_generator.manual_seed(step_key)
        prepare_for_graphs(keys.device)
        self.default_device = torch.get_default_device()

    def suspend(self) -> tuple[dict[str, Any], Tensor]:
        """The state of the current micro-batch, so that another one can begin before it has ended."""
        return {name: getattr(self, name) for name in _OF_A_BATCH}, torch.default_generator.get_state()

    def resume(self, saved: tuple[dict[str, Any], Tensor]) -> None:
        """Continue with a micro-batch that was suspended."""
        for name, value in saved[0].items():
            setattr(self, name, value)
        torch.default_generator.set_state(saved[1])

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            if torch.compiler.is_compiling():
                return _trace(self, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        if not torch.compiler.is_compiling() and vmap_randomness() in ("different", "error"):
            return _draw_in_vmap(self, func, args, kwargs or {})
        if self._run_rule is None or torch.compiler.is_compiling():
            return rule(self, func, args, kwargs or {})
        return self._run_rule(rule, self, func, args, kwargs or {})

    def expect_compiled_models(self) -> None:
        """Keep Dynamo from compiling the rules by themselves, after a graph break of a compiled model."""
        dispatch_in_graphs(self._rules)
        never_compile_alone(type(self).__torch_function__)
        never_compile_alone(vmap_randomness)
        self._run_rule = torch.compiler.disable(_call)

    # Draws

    @contextmanager
    def rows_in(self, batch_dim: int | None) -> Generator[None]:
        """Inside, the rows are known to be in this dimension."""
        before, self.batch_dim = self.batch_dim, batch_dim
        try:
            yield
        finally:
            self.batch_dim = before

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

    def start_block(self) -> None:
        """Continue with the numbers that a compiled block had before, if the backward pass computes it again."""
        marker = int(torch.randint(1 << 62, (), generator=torch.default_generator))
        self._count = self._blocks.setdefault(marker, self._count)

    @contextmanager
    def recomputing(self) -> Generator[None]:
        """Inside, blocks may be computed again; later draws get numbers of their own."""
        before = self._count
        yield
        self._count = max(self._count, before)

    def keys(self, device: torch.device) -> Tensor:
        """The keys of the rows, on `device`."""
        if device not in self._keys:
            self._keys[device] = next(iter(self._keys.values())).to(device)
        return self._keys[device]

    def layout(
        self, shape: Sequence[int], like: Tensor | None, number: int, fresh: bool = False, more_dims: bool = False
    ) -> Layout | None:
        """Where the rows are in the draw with this shape and number; None for a draw that all ranks share.

        `like` is the tensor whose shape it is, and `fresh` says that it was created for the draw. `more_dims` says that
        the draw may have dimensions which the activations of the model do not have.
        """
        if isinstance(like, nn.Parameter) or (not torch.compiler.is_compiling() and vmap_randomness() is not None):
            return None
        activation = like is not None and not fresh
        tiled = len(shape) > 0 and (shape[0] in self._tiled or (self.batch_dim == 1 and activation))
        found = candidate_layouts(shape, self._rows, self.batch_dim, activation, tiled)
        if torch.compiler.is_compiling():
            return self._layout_in_graph(found, shape, like is None or fresh or more_dims)
        line = _calling_line()
        if self._rows > 1 and self.batch_dim is None:
            found = self._most_likely_first(found, shape, like is None or fresh or more_dims)
        if activation:
            # layers share their lines: the number of the draw tells them apart, in the same kind of loop
            place = self._kind, number, line, len(shape)
            chosen = self._memory.choose(place, self._rows, tuple(shape), found)
        elif self._rows == 1 and found:
            return found[0] if self._single_row_draws(line, shape, like) else None
        else:
            chosen = self._memory.choose(line, self._rows, tuple(shape), found)
        if chosen is None:
            self.shared[line] += 1
        return chosen

    def _layout_in_graph(self, found: list[Layout], shape: Sequence[int], own_shape: bool) -> Layout | None:
        """The layout of a draw in a graph, which is compiled once: what is unclear is noted, and judged afterwards."""
        if len(found) == 1 and not own_shape:
            self._dims_in_graphs |= 1 << found[0].dim
        elif len(found) > 1 and self.batch_dim is None:
            self._unclear, self._unclear_dim = tuple(shape), -1 if own_shape else found[0].dim
        return found[0] if found else None

    @property
    def unclear_in_graphs(self) -> tuple[int, ...] | None:
        """The shape of a draw in a compiled graph whose rows may be in another dimension than it was assumed."""
        shown = self._dims_in_graphs == 1 << max(self._unclear_dim, 0) or self.row_dims == {self._unclear_dim}
        return None if self._unclear_dim >= 0 and shown else self._unclear

    def _most_likely_first(self, found: list[Layout], shape: Sequence[int], own_shape: bool) -> list[Layout]:
        """The layouts that a draw may have, first those that activations have shown, which it need not share."""
        if len(found) < 2:
            self.row_dims |= {layout.dim for layout in found if not own_shape}
            return found
        likely = [layout for layout in found if {layout.dim} == self.row_dims]
        later = self._batches > 1  # later draws of the first micro-batch may still show it
        unclear = own_shape or (later and not likely) or (likely and likely[0] != found[0])
        found = [*likely, *(layout for layout in found if layout not in likely)]
        if unclear:
            self.warn(
                f"ambiguous {_calling_line()}",
                f"a draw of shape {tuple(shape)} may have the {self._rows} rows of the micro-batch in its "
                f"{found[0].kind} or in its {found[1].kind}, and samestep takes its {found[0].kind}: if that is wrong, "
                "the numbers depend on the number of ranks; declare it with run.wrap(model, batch_dim=0) or 1",
            )
        return found

    @property
    def single_row(self) -> bool:
        """Whether the micro-batch has one row, so that a size of 1 does not show whose dimension it is."""
        return self._rows == 1

    def _single_row_draws(self, line: tuple[object, int], shape: Sequence[int], like: Tensor | None) -> bool:
        """Whether a draw with a first size of 1, in a micro-batch of one row, belongs to the row."""
        known = self._memory.has_rows(line)
        if known is not None:
            return known
        created = getattr(like, _FROM_ROWS, None)  # None for a tensor computed from others, such as empty_like(x)
        if any(isinstance(size, RowCount) for size in shape) or created or (like is not None and created is None):
            return True
        of_row = self._reads_length()  # torch.rand(1) there may still be one number for all
        if of_row or len(shape) > 1:
            self.warn(
                f"single row {line}",
                f"a draw of shape {tuple(shape)} in a micro-batch of one row may be meant for its sample or for all "
                f"samples, and samestep takes it for {'its sample' if of_row else 'all samples'}: write x.shape[0] for "
                "the number of rows, not len(x) or a constant, or pass a micro_batch= of at least 2",
            )
        return of_row

    def _reads_length(self) -> bool:
        return _calling_line()[0] in self._length_readers

    def note_length(self) -> None:
        """Remember that a function asks for len(x): what it draws with a size of 1 belongs to the row."""
        self._length_readers.add(_calling_line()[0])

    def note_size(self, tensor: Tensor, sizes: Sequence[object]) -> None:
        """Remember whether a tensor was created with the number of rows as a size."""
        setattr(tensor, _FROM_ROWS, any(isinstance(size, RowCount) for size in sizes) or self._reads_length())

    def attention_fits(self, weights_bytes: int) -> bool:
        """Whether the attention weights of all layers fit into memory, if each has as many bytes as this one."""
        if not torch.compiler.is_compiling():
            self._attention_calls += 1
        return weights_bytes * self.attention_layers <= self.attention_limit

    def may_have_rows(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape may have one entry per row of the micro-batch."""
        return bool(candidate_layouts(shape, self._rows, self.batch_dim, activation=False, tiled=False))

    def note_tiled(self, result: Tensor) -> None:
        """Remember that tensors of this size are the rows several times over, one copy after the other."""
        if result.dim() > 1 and result.shape[1] == self._rows:  # (copies, rows, ...), which may be flattened
            self._tiled.add(result.shape[0] * self._rows)
        if result.dim() and result.shape[0] > self._rows and result.shape[0] % self._rows == 0:
            self._tiled.add(result.shape[0])

    def fill(
        self, draw: Draw, shape: Sequence[int], device: torch.device, like: Tensor | None = None, fresh: bool = False,
        more_dims: bool = False,
    ) -> Tensor:  # fmt: skip
        """What `draw` gives for this shape: for each row of the micro-batch from its key, otherwise from the step's."""
        number = self.number()
        layout = self.layout(shape, like, number, fresh, more_dims)
        if layout is None:
            return draw(self._shared_key(device), shape, number)[0]
        return layout.back(draw(self.keys(device), layout.row_sizes(shape), number), shape)

    def drop(self, tensor: Tensor, p: float) -> Tensor:
        """Dropout of `tensor`, keyed."""
        number = self.number()
        layout = self.layout(tensor.shape, tensor, number)
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
        """A draw without a formula here: torch's function for each row, with a generator seeded by its key."""
        number = self.number()
        layout = self.layout(shape, like, number)
        keys = self.keys(device) if layout is not None else self._shared_key(device)
        seeds = uniform(keys, (2,), number, torch.float32).double().mul_(1 << 24).long().tolist()
        generators = [torch.Generator(device).manual_seed(high << 24 | low) for high, low in seeds]
        if layout is None:
            return draw(like, shape, generators[0])
        sizes = layout.row_sizes(shape)
        rows = [None] * self._rows if like is None else layout.by_row(like, self._rows)
        drawn = [draw(row, sizes, generator) for row, generator in zip(rows, generators, strict=True)]
        return layout.back(torch.stack(drawn), (shape[0], *drawn[0].shape[1:]))  # multinomial has other columns

    def fused(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        """A kernel that draws by itself: seeded, but by the micro-batch of this rank and not by its samples."""
        seed = (self._fused_seed + self.number() * 0x9E3779B97F4A7C15) % (1 << 63)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            return func(*args, **kwargs)

    def warn(self, topic: str, text: str) -> None:
        """Warn once per topic, with the place in the user's code."""
        self._warn(topic, text)

    def _shared_key(self, device: torch.device) -> Tensor:
        if device not in self._step_keys:
            self._step_keys[device] = _filled(self._step_key, device)
        return self._step_keys[device]


def _filled(key: int, device: torch.device) -> Tensor:
    """A key on the device, written there: a copy from the host would wait for everything that the GPU has to do."""
    return torch.full((1,), key, dtype=torch.int64, device=device)


def row_loops(draws: Mapping[tuple[Any, int], int], rows: int) -> set[str]:
    """The lines that have drawn once for each row, in draws without a dimension for the rows."""
    found = (place for place, count in draws.items() if count == rows > 1)
    return {f"{code.co_filename}:{list(code.co_positions())[at // 2][0]}" for code, at in found}


def _draw_in_vmap(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch draw, since samestep cannot tell the rows apart there; torch's own error without `randomness=`."""
    drawn = func(*args, **kwargs)
    mode.warn(
        "unseen",
        "inside of torch.vmap(..., randomness='different') samestep cannot key random numbers by sample: they depend "
        "on the number of ranks and on micro_batch; draw them before, as in torch.rand(x.shape[0], ...), and pass them "
        "to the function",
    )
    return drawn


def _trace(mode: KeyedDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that has no rule, while Dynamo traces it."""
    name = getattr(func, "__name__", "")
    if name == "unflatten":
        return torch.unflatten(*args, **kwargs)  # Dynamo cannot trace super() in Tensor.unflatten here
    if name != "tag_activation_checkpoint":
        return func(*args, **kwargs)
    layer = args[0]

    def keyed(*inputs: Any, **options: Any) -> Any:  # Dynamo would trace a checkpointed layer without this mode
        with mode:
            return layer(*inputs, **options)

    return func(keyed, *args[1:], **kwargs)


def _call(rule: Rule, *args: Any) -> Any:
    return rule(*args)


def _calling_line() -> tuple[object, int]:
    """The place outside of torch that leads to a torch function, as (code, instruction): a line may draw twice."""
    frame = calling_frame(_SKIPPED_FILES)
    return frame.f_code, frame.f_lasti
