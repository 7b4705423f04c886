"""A teacher: a frozen model that you call like a module and that is never part of what trains."""

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from samestep.context import RunContext
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_seconds, warn
from samestep.teacher.frozen_model import SHOWN, Build, FrozenModel, check_same_teacher
from samestep.teacher.model_files import build_from_folder, open_weights
from samestep.teacher.options import PLACEMENTS, PlacedTeacher, TeacherOptions, check_teacher_options, shared_options
from samestep.teacher.outputs import keep_top_k
from samestep.teacher.placement_choice import batch_rows, choose_placement

if TYPE_CHECKING:
    from samestep.teacher.across_ranks import ServedOutputs

_WARM_UP_CALLS: Final = 1  # the first call loads kernels and touches memory
_TIMED_CALLS: Final = 3


def open_teacher(
    context: RunContext,
    build: Build | str | Path,
    weights: str | Path | None,
    placement: str | None,
    options: TeacherOptions,
) -> "Teacher":
    """Build, check and place a teacher. A collective: it succeeds or fails on all ranks."""
    placement = None if placement == "auto" else placement
    check_teacher_options(placement, options, weights)
    if options.device_map is not None:
        placement = "custom"
    frozen = run_on_every_rank(
        context.comm, "reading the teacher", TeacherError, _open_model, build, weights, options.dtype
    )
    if options.example is not None:
        frozen.example, options = options.example, replace(options, example=None)  # a server process does not need it
    check_same_teacher(context.comm, frozen, shared_options(placement, options))
    if frozen.unused:
        context.print(
            f"teacher: {len(frozen.unused)} name(s) in {frozen.weights.path} are not in the module and stay unused, "
            f"e.g. {frozen.unused[:SHOWN]}"
        )
    timer = None
    if placement is None:
        choice = choose_placement(context, frozen, options)
        placement, timer = choice.placement, CallTimer(context.device, choice.seconds, context.print)
    placed = placement_function(placement)(context, frozen, options)
    context.print(f"teacher: {placed.description}")
    return Teacher(placed, placement, frozen, context.device, options, timer)


class Teacher:
    """A frozen model in its placement; `teacher(**batch)` returns its outputs for this rank's micro-batch.

    It is not a torch.nn.Module: as an attribute of a module it adds nothing to parameters, state dicts, checkpoints or
    gradients, and a copy of that module shares it.
    """

    def __init__(
        self,
        placed: PlacedTeacher,
        placement: str,
        frozen: FrozenModel,
        device: torch.device,
        options: TeacherOptions,
        timer: "CallTimer | None",
    ) -> None:
        self._placed: PlacedTeacher | None = placed
        self._device_type, self._options, self._timer = device.type, options, timer
        self._checked = False
        self._dtypes = {frozen.dtype(name, options.dtype) for name in frozen.stored_names()}
        self.placement = placement
        """Its placement, by the name that run.teacher takes."""
        self.bytes = frozen.total_bytes(options.dtype)
        """Bytes of its weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the module in evaluation mode, without gradients or autocast, on this rank's device."""
        placed = self._require_open()
        # The autocast of the student must not apply: it would reach a teacher in this process, but not a served one.
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False), torch.autocast("cpu", enabled=False):
            try:
                outputs = placed(*args, **kwargs) if self._timer is None else self._timer.call(placed, args, kwargs)
            except (RuntimeError, TeacherError) as error:
                _add_dtype_note(error, self._dtypes, (args, kwargs))
                raise
            if not self._checked:  # once: looking at the values of every call would wait for the device
                self._checked = True
                _warn_of_nan(outputs)
            return keep_top_k(outputs, self._options.top_k, self._options.temperature)

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any] | ServedOutputs":
        """Request outputs and continue; `.result()` waits for them.

        A served teacher computes in the background, every other placement computes now.
        """
        if (submit := getattr(self._placed, "submit", None)) is not None:
            return submit(*args, **kwargs)
        ready = Future[Any]()
        ready.set_result(self(*args, **kwargs))
        return ready

    @property
    def module(self) -> nn.Module:
        """The frozen module itself, for training that passes gradients through it to its inputs.

        Its parameters get no gradients. You call it like any module, with the precision of the run, and it is not part
        of a wrapped model unless you make it an attribute of one. Placements gpu, cpu, balanced, sequential and custom
        have a module.
        """
        module = getattr(self._require_open(), "module", None)
        if module is None:
            raise TeacherError(
                f"placement={self.placement!r} has no module to pass gradients through, because its weights do not "
                "stay on the device that uses them: use placement='gpu', 'cpu', 'balanced', 'sequential' or 'custom'"
            )
        return module

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must make the same number of calls."""
        return bool(getattr(self._placed, "lockstep", False))

    def describe(self) -> str:
        """Return one line: where the weights are and how many bytes they have."""
        return "closed" if self._placed is None else self._placed.description

    def summary(self) -> dict[str, object]:
        """Return placement and bytes, and the measured and estimated time of a call if the placement was chosen."""
        timing = {} if self._timer is None else self._timer.timing
        return {"placement": self.placement, "bytes": self.bytes, **timing}

    def close(self) -> None:
        """Free memory, threads and processes; the run does it at its end.

        Before that only call it if no rank calls the teacher again: a rank that serves a teacher ends it for all ranks.
        """
        if self._placed is not None:
            self._placed, placed = None, self._placed
            placed.close()

    def _require_open(self) -> PlacedTeacher:
        if self._placed is None:
            raise TeacherError(
                "this teacher is closed because its run has ended: use it inside `with Run(...) as run:`"
            )
        return self._placed

    def __deepcopy__(self, memo: dict[int, object]) -> "Teacher":
        return self

    def __reduce__(self) -> NoReturn:
        raise TeacherError(
            "a teacher cannot be pickled, also not as an attribute of a model: save model.state_dict(), which does not "
            "include it"
        )

    def __repr__(self) -> str:
        return f"Teacher({self.describe()})"


class CallTimer:
    """Times calls 2 to 4 of a teacher and prints once how they compare with the estimate; does not time later calls.

    Each rank times its own calls, rank 0 prints. A timed call synchronizes the device before and after.
    """

    def __init__(self, device: torch.device, estimate: Callable[[int], float], print_: Callable[[str], None]) -> None:
        self._device, self._estimate, self._print = device, estimate, print_
        self._calls: list[tuple[float, int]] = []
        self.timing: dict[str, float] = {}  # rows and seconds of the median call; empty until they are known

    def call(self, placed: PlacedTeacher, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Return the outputs of a call, and time it if it is one of the first."""
        if self.timing:
            return placed(*args, **kwargs)
        start = self._synchronized_time()
        outputs = placed(*args, **kwargs)
        self._calls.append((self._synchronized_time() - start, batch_rows((args, dict(kwargs)))))
        if len(self._calls) == _WARM_UP_CALLS + _TIMED_CALLS:
            self._report()
        return outputs

    def _report(self) -> None:
        seconds, rows = sorted(self._calls[_WARM_UP_CALLS:])[_TIMED_CALLS // 2]
        estimated = self._estimate(rows)
        self.timing = {"rows": rows, "measured_seconds": seconds, "estimated_seconds": estimated}
        ratio = seconds / estimated if estimated else float("inf")
        factor = f"{ratio:.3g} times slower" if ratio >= 1 else f"{1 / ratio:.3g} times faster"
        self._print(
            f"teacher: a call with {rows} sample(s) takes {format_seconds(seconds)}, {factor} than the estimate of "
            f"{format_seconds(estimated)}"
        )

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def placement_function(placement: str) -> Callable[[RunContext, FrozenModel, TeacherOptions], PlacedTeacher]:
    """Return the function that places a teacher."""
    module, _, name = PLACEMENTS[placement].partition(":")
    return getattr(importlib.import_module(f"samestep.teacher.{module}"), name)


def _open_model(build: Build | str | Path, weights: str | Path | None, dtype: torch.dtype | None) -> FrozenModel:
    if isinstance(build, torch.nn.Module):
        kind = type(build).__name__
        raise TeacherError(
            f"build={kind}(...) is a module and already takes memory on every rank: pass the function that builds it, "
            f"e.g. build=lambda: {kind}(...)"
        )
    if isinstance(build, str | Path):
        folder = Path(build).expanduser().absolute()
        if not folder.exists():
            raise TeacherError(
                f"run.teacher({str(build)!r}): this folder does not exist, and samestep downloads nothing: pass the "
                "folder of a Hugging Face model, which you get with `hf download NAME --local-dir FOLDER`"
            )
        stored = open_weights(folder if weights is None else weights)
        builder, unused = build_from_folder(folder, stored, dtype)
        return FrozenModel(builder, stored, unused)
    if weights is None:
        raise TeacherError(
            "run.teacher needs weights=: pass a .safetensors file, a folder of shards, or a Hugging Face folder"
        )
    if not callable(build):
        raise TeacherError(f"build={build!r} is not a function: pass one that builds the teacher's module")
    return FrozenModel(build, open_weights(weights))


def _warn_of_nan(outputs: object) -> None:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if any(bool(tensor.isnan().any()) for tensor in tensors):
        warn(
            "the teacher returned nan in its first call, which the student would learn: check its weights and inputs, "
            "or pass a dtype= with a larger range, such as torch.bfloat16 or torch.float32"
        )


def _add_dtype_note(error: Exception, weights: set[torch.dtype], inputs: object) -> None:
    """Add a note to the error of a call if an input has another dtype than all weights: torch names neither."""
    given = {leaf.dtype for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}
    own = sorted(str(dtype) for dtype in weights if dtype.is_floating_point)
    if own and (other := sorted(map(str, given - weights))):
        error.add_note(
            f"the teacher's weights are {', '.join(own)}, but its inputs are {', '.join(other)}: pass inputs with "
            f".to({own[0]}), or run.teacher(..., dtype={other[0]})"
        )
