"""Decides when draws are keyed: always in models that draw, never in those that do not, and warns of unseen draws."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.data.global_rng import PYTHON_GENERATORS
from samestep.data.permutation import Purpose, key64, keyed_word
from samestep.parallel.draw_rules import DRAW_RULES
from samestep.parallel.keyed_draws import KeyedDraws, row_loops
from samestep.torch_private import is_compiled, is_entered

Kind = Literal["training", "evaluation"]

_FIRST_DRAW: Final = 0x44524157 << 16  # far from the salts 1, 2, 3, ... of step.random and step.normal
_DRAWS_PER_PASS: Final = 1 << 20
_WATCHED: Final = 3  # micro-batches that are watched before a model counts as one that draws nothing
_COMPILED_CHECKS: Final = 16  # micro-batches in a row; each of the first ones may compile another graph
_CHECK_EVERY: Final = 32  # micro-batches, on average, between two checks that take longer
_FEW_WORDS: Final = 8  # of 32 bits: fewer may be decisions for the whole step, such as random.random() < 0.5
_PERIOD: Final = 624  # words that a Mersenne Twister computes at a time
_MANY_WORDS: Final = 1 << 20  # counting ends there
_FREE_MEMORY_SHARE: Final = 0.5  # of the free memory, for the attention weights of all layers
_DROPS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RECURRENT_OR_ATTENTION: Final = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_BATCH_FIRST: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OWN_FOLDERS: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class ModelRandomness:
    """Keys the draws of the models of a run while a micro-batch is computed.

    `with randomness.micro_batch(...)` surrounds the user's loop body. The first micro-batches are watched. If nothing
    is drawn in them, later ones cost nothing but a look at the generators.
    """

    def __init__(
        self, seed: int, rank: int, device: torch.device, warn: Callable[[str], None], always: bool = False
    ) -> None:
        self._seed, self._rank, self._device, self._warn = seed, rank, device, warn
        self._always = always  # a compiled model would be compiled again when the watch ends
        self._models: list[nn.Module] = []
        self._mode = KeyedDraws(DRAW_RULES, self._warn_once)
        if always:
            self._mode.expect_compiled_models()
        self._warned: set[str] = set()
        self._seen: Counter[str] = Counter()  # micro-batches of each kind
        self._draws: dict[str, bool] = {"training": False, "evaluation": False}
        self._python_draws = False
        self._current: _OpenBatch | None = None
        self._probe: _DrawProbe | None = None
        self._python_per_row: Counter[str] = Counter()  # micro-batches with a number of Python or numpy for each row
        self._python_line = _PythonDrawLine()
        self._row_loops: set[str] = set()  # of the last micro-batch
        self._unseen_draws = 0  # micro-batches in a row that drew what no torch function showed

    def add_model(self, model: nn.Module, batch_dim: int | None) -> None:
        """Register a model: a model with dropout layers draws, and some layers have the batch in dimension 1."""
        self._models.append(model)
        modules = list(model.modules())
        if any(isinstance(module, _DROPS) and module.p > 0 for module in modules):
            self._draws["training"] = True
        attention = sum("attention" in type(module).__name__.lower() for module in modules)
        self._mode.attention_layers = max(self._mode.attention_layers, attention)
        if any(isinstance(module, _BATCH_FIRST) for module in modules):
            self._mode.row_dims.add(0)
        for module in filter(is_compiled, modules):
            hook: Any = torch.compiler.disable(self._start_block)
            module.register_forward_pre_hook(hook)
        layers = [module for module in modules if isinstance(module, _RECURRENT_OR_ATTENTION)]
        time_first = bool(layers) and not any(map(_is_batch_first, layers))
        if batch_dim is not None or time_first:
            self._mode.batch_dim = 1 if batch_dim is None else batch_dim

    def _start_block(self, *_: object) -> None:
        if self._current is not None and self._current.keyed:
            self._mode.start_block()

    def micro_batch(
        self, kind: Kind, step: int, number: int, keys: Callable[[], Tensor], passes_done: int = 0
    ) -> "_OpenBatch":
        """A context for a micro-batch: the `number`-th of this rank in its step, with the keys of its rows.

        A step that reads its micro-batches several times draws other numbers in each pass.
        """
        self._seen[kind] += 1
        watched = self._seen[kind] <= _WATCHED
        batch = _OpenBatch(self, kind, watched, keyed=watched or self._draws[kind] or self._always)
        if batch.keyed:
            batch.step_key = key64(Purpose.STEP, self._seed, step, kind == "evaluation", passes_done) % (1 << 63)
            fused_seed = key64(Purpose.FUSED_KERNEL, batch.step_key, self._rank, number) % (1 << 63)
            first_draw = _FIRST_DRAW + passes_done * _DRAWS_PER_PASS
            batch.begin = partial(self._begin, batch, keys, fused_seed, first_draw)
        else:
            batch.before = _GeneratorStates(self._device)
        return batch

    def _is_checked(self, kind: Kind) -> bool:
        """Whether this micro-batch is one of those that get the slower checks; at no fixed interval."""
        return keyed_word(self._seed, self._seen[kind]) % _CHECK_EVERY == 0

    def close(self) -> None:
        """Stop replacing draws; at the end of a run, a loop that was left by an exception may still hold its batch."""
        while (batch := self._current) is not None:
            batch.closed = False  # an exception from a signal may have interrupted `leave`
            batch.__exit__(RuntimeError, None, None)

    def open(self, batch: "_OpenBatch") -> None:
        """Enter a micro-batch; one that is still open, such as that of a loop around an evaluation, waits."""
        batch.outer = self._current
        while batch.outer is not None and batch.outer.closed:
            batch.outer = batch.outer.outer
        if batch.outer is not None and batch.outer.keyed:
            batch.outer.suspended = self._mode.suspend()
            self._stop_keying()
        self._current = batch
        if batch.begin is not None:
            begin, batch.begin = batch.begin, None  # it refers to the batch: a cycle would keep its tensors alive
            begin()
            if self._probe is not None:
                self._probe.start(self._models, self._mode)
            self._mode.__enter__()
        if self._python_per_row[batch.kind] and batch.watched:
            self._python_line.start()

    def leave(self, batch: "_OpenBatch", failed: bool) -> None:
        """Leave a micro-batch, and continue with the one around it."""
        batch.closed = True
        if self._current is not batch:  # zip(first, second) ends the micro-batch of `first` inside that of `second`
            return
        self._python_line.stop()
        self._stop_keying()
        if batch.before is not None:
            if failed:
                batch.before.restore_cuda()
                batch.before.restore_python()
            elif batch.keyed:
                self._learn(batch, batch.before)
            elif batch.before.moved():
                self._start_late(batch.kind)
        if self._probe is not None:
            self._probe.stop()
        self._current = batch.outer
        while self._current is not None and self._current.closed:
            self._current = self._current.outer
        if self._current is not None and self._current.suspended is not None:
            self._mode.resume(self._current.suspended)
            self._mode.__enter__()

    def _stop_keying(self) -> None:
        if is_entered(self._mode):
            self._mode.__exit__(None, None, None)

    def _begin(self, batch: "_OpenBatch", keys: Callable[[], Tensor], fused_seed: int, first_draw: int) -> None:
        """Seed the generators and start to key draws."""
        batch.before = _GeneratorStates(self._device)
        # again after the first step, which allocates the optimizer's state; a compiled model would be compiled again
        if batch.watched and (self._seen[batch.kind] == 1 or not self._always):
            self._mode.attention_limit = _free_memory(self._device) * _FREE_MEMORY_SHARE
        batch.before.seed_cuda(fused_seed)
        row_keys = keys()
        batch.rows = len(row_keys)
        self._mode.begin(row_keys, batch.step_key, fused_seed, first_draw, batch.kind)
        if batch.watched or self._python_draws:
            batch.before.seed_python(batch.step_key)

    def _learn(self, batch: "_OpenBatch", before: "_GeneratorStates") -> None:
        """Learn whether the micro-batch has drawn; if not, leave no trace in the generators."""
        if self._mode.draws:
            self._draws[batch.kind] = True
        if before.python_moved():
            self._learn_python(batch, before)
        if batch.watched or self._unseen_draws > 0 or self._is_checked(batch.kind):
            moved = before.torch_moved_unseen(batch.step_key, self._mode.distinct_draws)
            self._unseen_draws = self._unseen_draws + 1 if moved else 0
            if moved:
                self._report_unseen(batch.kind)
        if self._always:
            self._report_compiled(batch)
        self._report_row_loops(batch)
        before.restore_cuda()
        before.restore_python()
        if not self._mode.draws:
            before.restore_torch()

    def _learn_python(self, batch: "_OpenBatch", before: "_GeneratorStates") -> None:
        """Python's or numpy's generator was used: it is seeded from now on."""
        if before.python_seeded:
            self._draws[batch.kind] = self._python_draws = True
            self._report_python(batch, before)
        else:
            self._start_late(batch.kind)

    def _report_row_loops(self, batch: "_OpenBatch") -> None:
        """Warn of a line that draws once per row, in a Python loop over the rows, if two micro-batches show it."""
        loops = row_loops(self._mode.shared, batch.rows) if batch.watched else set[str]()
        if again := sorted(loops & self._row_loops):
            self._warn_once(
                "row loop",
                f"{again[0]} draws {batch.rows} times in a micro-batch of {batch.rows} rows, as in a loop over its "
                "rows, and samestep keys such draws by the step and not by the sample, so they depend on the number of "
                "ranks: draw for all rows at once, as in torch.rand(x.shape[0]), or in __getitem__ of the dataset",
            )
        self._row_loops = loops

    def _start_late(self, kind: Kind) -> None:
        """A model that drew nothing at first draws now."""
        self._draws[kind] = self._python_draws = True
        self._warn_once(
            "late",
            f"the model has started to draw random numbers in {kind}, which it did not in the first "
            f"{self._seen[kind] - 1} micro-batches: in this one they depended on the number of ranks, from now on they "
            "are keyed",
        )

    def _report_unseen(self, kind: Kind) -> None:
        """Name the module that draws in a way that cannot be keyed, after a second micro-batch has shown which it is.

        The compiler draws too, while it measures kernels, so a compiled model must draw in several micro-batches.
        """
        if self._unseen_draws < (_COMPILED_CHECKS if self._always else 2):
            self._draws[kind] = True
            self._probe = None if self._always else _DrawProbe()
        elif "unseen" not in self._warned:
            found = self._probe.found if self._probe is not None else "in a compiled model"
            where = found or "outside of the modules of the wrapped models"
            self._warned.add("unseen")
            self._warn(
                f"random numbers are drawn {where} in a way that samestep cannot key by sample (a custom kernel, or "
                "code that reads torch's generator itself): they depend on the number of ranks and on micro_batch; "
                "use torch.rand, torch.randn, torch.bernoulli or F.dropout there, or step.random and step.normal"
            )

    def _report_compiled(self, batch: "_OpenBatch") -> None:
        """Warn of what a compiled graph cannot learn from other micro-batches."""
        if (shape := self._mode.unclear_in_graphs) is not None:
            self._warn_once(
                "ambiguous in a graph",
                f"a draw of shape {shape} in a compiled model may have the {batch.rows} rows of the "
                "micro-batch in more than one dimension: if samestep takes the wrong one, the numbers depend on the "
                "number of ranks; declare it with run.wrap(model, batch_dim=0) or batch_dim=1",
            )
        if batch.rows == 1 and self._mode.draws:
            self._warn_once(
                "single row in a graph",
                "a compiled model draws random numbers in micro-batches of one row, where samestep cannot tell a draw "
                "for the row from one for the whole step, such as torch.rand(1): pass a micro_batch= of at least 2",
            )

    def _report_python(self, batch: "_OpenBatch", before: "_GeneratorStates") -> None:
        """Warn if each watched micro-batch draws a number for each row from Python or numpy, and name the line."""
        if not batch.watched or before.python_words(batch.step_key) < max(batch.rows, _FEW_WORDS):
            return
        self._python_per_row[batch.kind] += 1
        if self._python_per_row[batch.kind] == _WATCHED and "python" not in self._warned:
            self._warned.add("python")
            self._warn(
                f"{self._python_line.found or 'random or numpy.random'} draws at least one number for each of the "
                f"{batch.rows} rows of a micro-batch, and samestep cannot tell which number belongs to which sample: "
                "all micro-batches of a step draw the same numbers, so the result depends on the number of ranks; use "
                "torch.rand or torch.randn, which samestep keys by sample, or draw in __getitem__ of the dataset"
            )

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(f"{text}{_place(self._models)}")


class _OpenBatch:
    """A micro-batch that the user's loop body computes."""

    def __init__(self, randomness: ModelRandomness, kind: Kind, watched: bool, keyed: bool) -> None:
        self._randomness = randomness
        self.kind: Kind = kind
        self.watched, self.keyed = watched, keyed  # whether to look for draws of any kind, and whether to key draws
        self.step_key = self.rows = 0
        self.begin: Callable[[], None] | None = None
        self.before: _GeneratorStates | None = None
        self.outer: _OpenBatch | None = None  # the micro-batch that was open before
        self.suspended: tuple[dict[str, Any], Tensor] | None = None  # the draws of this one, while it waits
        self.closed = False

    def __enter__(self) -> None:
        self._randomness.open(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.closed:
            self._randomness.leave(self, failed=kind is not None)


class _GeneratorStates:
    """The states of the generators of torch, Python and numpy."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator.get_state()
        self._bytes = self._cpu.numpy().tobytes()  # several times quicker to compare than tensors
        self._cuda = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
        self._cuda_seed, self._offset = (
            (0, 0) if self._cuda is None else (self._cuda.initial_seed(), self._cuda.get_offset())
        )
        self._cuda_start = self._offset
        self._python = self._python_mark = _python_states()
        self.python_seeded = False

    def seed_cuda(self, seed: int) -> None:
        """Seed the CUDA generator for kernels that cannot be keyed: they should not draw the same on every rank."""
        if self._cuda is not None:
            self._cuda.manual_seed(seed)
            self._cuda_start = 0

    def moved(self) -> bool:
        """Whether a generator has been used since."""
        if self._bytes != torch.default_generator.get_state().numpy().tobytes() or self._cuda_moved():
            return True
        return self.python_moved()

    def torch_moved_unseen(self, seed: int, draws: int) -> bool:
        """Whether torch's generators have moved by more than one number for each keyed draw since they were seeded."""
        return self._moved_from(torch.Generator().manual_seed(seed), draws)

    def torch_moved_beyond(self, draws: int) -> bool:
        """The same, since these states were taken."""
        before = torch.Generator()
        before.set_state(self._cpu)
        return self._moved_from(before, draws)

    def _moved_from(self, expected: torch.Generator, draws: int) -> bool:
        if self._cuda_moved():
            return True
        now = torch.default_generator.get_state().numpy().tobytes()
        for _ in range(draws + 1):  # fewer than all if the script restores a state, as torch.random.fork_rng does
            if expected.get_state().numpy().tobytes() == now:
                return False
            torch.randint(1 << 62, (), generator=expected)
        return True

    def seed_python(self, seed: int) -> None:
        """Seed Python's and numpy's generators."""
        for generator in PYTHON_GENERATORS:
            generator.seed(seed)
        self._python_mark, self.python_seeded = _python_states(), True

    def python_moved(self) -> bool:
        """Whether Python's or numpy's generator was used, since it was seeded if it was."""
        return _python_states() != self._python_mark

    def python_words(self, seed: int) -> int:
        """How many words of 32 bits Python's or numpy's generator has given since it was seeded."""
        numpy, python = np.random.RandomState(seed % (1 << 32)), random.Random(seed)
        by_numpy = _words(
            lambda: np.random.get_state(legacy=False)["state"], lambda: numpy.get_state(legacy=False)["state"],
            lambda: numpy.bytes(4 * _PERIOD),
        )  # fmt: skip
        by_python = _words(lambda: _twister(random), lambda: _twister(python), lambda: python.getrandbits(32 * _PERIOD))
        return max(by_numpy, by_python)

    def restore_cuda(self) -> None:
        """Set the CUDA generator back."""
        if self._cuda is not None:
            self._cuda.manual_seed(self._cuda_seed)
            self._cuda.set_offset(self._offset)

    def restore_torch(self) -> None:
        """Set torch's generator of the CPU back."""
        torch.default_generator.set_state(self._cpu)

    def restore_python(self) -> None:
        """Set Python's and numpy's generators back if they were seeded: what the loop draws is not moved by this."""
        if self.python_seeded:
            for generator, state in zip(PYTHON_GENERATORS, self._python, strict=True):
                generator.restore(state)

    def _cuda_moved(self) -> bool:
        return self._cuda is not None and self._cuda.get_offset() != self._cuda_start


def _words(current: Callable[[], Any], seeded: Callable[[], Any], advance: Callable[[], object]) -> int:
    """The words that a Mersenne Twister has given since it was seeded; it computes `_PERIOD` of them at a time."""
    state = current()
    for words in range(-_PERIOD, _MANY_WORDS, _PERIOD):
        if np.array_equal(state["key"], seeded()["key"]):
            return words + int(state["pos"])
        advance()
    return _MANY_WORDS


def _twister(generator: Any) -> dict[str, Any]:
    *key, position = generator.getstate()[1]
    return {"key": key, "pos": position}


class _PythonDrawLine:
    """Finds the line of the script that moves Python's or numpy's generator, by tracing one micro-batch."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._traced: list[FrameType] = []
        self._before: tuple[Any, ...] = ()
        self._place: tuple[str, int] = "", 0  # where the script is

    def start(self) -> None:
        """Trace the lines of this thread outside of samestep and torch, unless a debugger does."""
        if self.found is None and sys.gettrace() is None:
            self._before = self._states()
            self._traced = [frame for frame in _frames() if _is_users(frame)]
            for frame in self._traced:
                frame.f_trace = self._trace
            sys.settrace(self._trace)

    def stop(self) -> None:
        """Stop tracing."""
        if self._traced:
            sys.settrace(None)
        while self._traced:
            self._traced.pop().f_trace = None

    @staticmethod
    def _states() -> tuple[Any, ...]:
        numpy = np.random.get_state(legacy=False)["state"]
        return random.getstate()[1][-2:], (int(numpy["key"][-1]), numpy["pos"])

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not _is_users(frame) or frame.f_code.co_filename == random.__file__ or self.found is not None:
            return None
        states = self._states()
        if states != self._before:
            name = "random" if states[0] != self._before[0] else "numpy.random"
            self.found = f"{name} at {self._place[0]}:{self._place[1]}"
        here = frame.f_back if event == "return" and frame.f_back is not None else frame
        self._place = here.f_code.co_filename, here.f_lineno
        return self._trace


class _DrawProbe:
    """Finds the module in which torch's generator moves without a keyed draw, in one micro-batch."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._hooks: list[RemovableHandle] = []

    def start(self, models: Sequence[nn.Module], mode: KeyedDraws) -> None:
        """Watch every module of the models."""
        for model in models if self.found is None else ():
            for name, module in model.named_modules():
                entered: list[Any] = []

                def before(*_: object, entered: list[Any] = entered) -> None:
                    entered.append((_GeneratorStates(next(iter(mode.key_devices))), mode.distinct_draws))

                def after(
                    *_: object, entered: list[Any] = entered, name: str = name, module: nn.Module = module
                ) -> None:
                    states, draws = entered.pop()
                    if self.found is None and states.torch_moved_beyond(mode.distinct_draws - draws):
                        self.found = f"in {name or 'the model'} ({type(module).__name__})"

                self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def stop(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()


def _python_states() -> tuple[object, ...]:
    return tuple(generator.snapshot() for generator in PYTHON_GENERATORS)


def _is_batch_first(module: nn.Module) -> bool:
    layer: Any = module if hasattr(module, "batch_first") else getattr(module, "self_attn", None)
    return bool(getattr(layer, "batch_first", True))


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float(psutil.virtual_memory().available)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def _place(models: Sequence[nn.Module]) -> str:
    """Where the user's code is: " (at model.py:12, in module 'encoder.drop')"."""
    frames = list(_frames())
    line = next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames if _is_users(frame)), None)
    names = {module: name for model in models for name, module in model.named_modules()}
    owners = (frame.f_locals.get("self") for frame in frames)
    name = next((names[owner] for owner in owners if isinstance(owner, nn.Module) and names.get(owner)), None)
    parts = ([f"at {line}"] if line else []) + ([f"in module {name!r}"] if name else [])
    return f" ({', '.join(parts)})" if parts else ""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((*_OWN_FOLDERS, "<"))
