"""A frozen model that teaches: called like a module, and never part of what trains."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_seconds
from samestep.teacher.frozen_model import SHOWN, Build, FrozenModel
from samestep.teacher.hugging_face import build_from_folder
from samestep.teacher.options import (
    PLACEMENTS,
    Ground,
    PendingOutputs,
    PlacedTeacher,
    TeacherOptions,
    asked_for,
    check_weights,
    check_wish,
)
from samestep.teacher.outputs import compressed
from samestep.teacher.placement_choice import choose_placement, rows_of
from samestep.teacher.teacher_fingerprint import check_alike
from samestep.teacher.weight_files import open_weights

_WARM_UP: Final = 1  # the first call loads kernels and touches memory
_TIMED: Final = 3


class Stopwatch:
    """Times calls 2 to 4 of a teacher and says once how far the estimate was off; later calls pass through.

    Each rank times its own, the first one says it. A timed call waits for its device before and after.
    """

    def __init__(self, device: torch.device, estimate: Callable[[int], float], say: Callable[[str], None]) -> None:
        self._device, self._estimate, self._say = device, estimate, say
        self._seen: list[tuple[float, int]] = []
        self.found: dict[str, float] = {}
        """Rows, measured and estimated seconds of the call in the middle; empty until it is known."""

    def call(self, placed: PlacedTeacher, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The outputs of a call, timed while that is of use."""
        if self.found:
            return placed(*args, **kwargs)
        self._wait()
        began = perf_counter()
        outputs = placed(*args, **kwargs)
        self._wait()
        self._seen.append((perf_counter() - began, rows_of((args, dict(kwargs)))))
        if len(self._seen) == _WARM_UP + _TIMED:
            self._tell()
        return outputs

    def _tell(self) -> None:
        seconds, rows = sorted(self._seen[_WARM_UP:])[_TIMED // 2]
        estimated = self._estimate(rows)
        self.found = {"rows": rows, "measured_seconds": seconds, "estimated_seconds": estimated}
        times = seconds / estimated if estimated else float("inf")
        off = f"{times:.3g} times as long" if times >= 1 else f"{1 / times:.3g} times as quick"
        self._say(
            f"teacher: a call with {rows} sample(s) takes {format_seconds(seconds)}, {off} as the estimate of "
            f"{format_seconds(estimated)}"
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


Place = Callable[[Ground, FrozenModel, TeacherOptions], PlacedTeacher]

_WITH_MODULE: Final = "'gpu', 'cpu', 'balanced', 'sequential' or 'custom'"


class Teacher:
    """A frozen model in its place; `teacher(**batch)` gives its outputs for this rank's micro-batch.

    It is no torch.nn.Module: as an attribute of one it adds nothing to parameters, states, checkpoints or gradients,
    and a copy of that module shares it.
    """

    def __init__(
        self,
        placed: PlacedTeacher,
        placement: str,
        frozen: FrozenModel,
        ground: Ground,
        wish: TeacherOptions,
        stopwatch: Stopwatch | None,
    ) -> None:
        self._placed: PlacedTeacher | None = placed
        self._kind, self._wish, self._stopwatch = ground.device.type, wish, stopwatch
        self._dtypes = {frozen.dtype(name, wish.dtype) for name in frozen.names()}
        self.placement = placement
        """Where it is, by the word that run.teacher takes."""
        self.bytes = frozen.bytes_in(wish.dtype)
        """Bytes of its weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module in evaluation mode, without gradients or autocast, on this rank's device."""
        placed = self._opened()
        # The student's precision is not the teacher's: it would reach one that is here, and not one that is served.
        with torch.no_grad(), torch.autocast(self._kind, enabled=False), torch.autocast("cpu", enabled=False):
            watched = self._stopwatch
            try:
                outputs = placed(*args, **kwargs) if watched is None else watched.call(placed, args, kwargs)
            except (RuntimeError, TeacherError) as error:
                _note_dtypes(error, self._dtypes, (args, kwargs))
                raise
            return compressed(outputs, self._wish.top_k, self._wish.temperature)

    @property
    def module(self) -> nn.Module:
        """The frozen module itself, for training that passes gradients through it to what lies before.

        Its parameters get none. It is called as any module, under the run's precision, and has no part in a wrapped
        model unless it is made an attribute of one. Placements that have one: gpu, cpu, balanced, sequential, custom.
        """
        module = getattr(self._opened(), "module", None)
        if module is None:
            raise TeacherError(
                f"placement={self.placement!r} has no module that gradients could pass through, as its weights do not "
                f"stay where they are used: use placement={_WITH_MODULE}"
            )
        return module

    def ahead(self, *args: Any, **kwargs: Any) -> PendingOutputs:
        """Ask for outputs and go on; `.result()` gives them. A served teacher computes meanwhile, others at once."""
        asking = getattr(self._placed, "ahead", None)
        return Ready(self(*args, **kwargs)) if asking is None else asking(*args, **kwargs)

    @property
    def lockstep(self) -> bool:
        """Whether its calls need all ranks, equally often."""
        return bool(getattr(self._placed, "lockstep", False))

    def describe(self) -> str:
        """One line: where the weights lie and how many bytes."""
        return "closed" if self._placed is None else self._placed.describe()

    def summary(self) -> dict[str, object]:
        """What is worth keeping: placement and bytes; where it was chosen, what a call takes and was to take."""
        timed = {} if self._stopwatch is None else self._stopwatch.found
        return {"placement": self.placement, "bytes": self.bytes, **timed}

    def _opened(self) -> PlacedTeacher:
        if self._placed is None:
            raise TeacherError("this teacher is closed, since its run has ended: use it inside `with Run(...) as run:`")
        return self._placed

    def close(self) -> None:
        """Give back memory, threads and processes; the run does it at its end.

        Before that only where no rank will ask again: the one that serves a teacher ends it for all.
        """
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()

    def __deepcopy__(self, memo: dict[int, object]) -> "Teacher":
        return self

    def __reduce__(self) -> NoReturn:
        raise TeacherError(
            "a teacher cannot be pickled, nor saved with the model whose attribute it is: save model.state_dict(), "
            "which holds nothing of it"
        )

    def __repr__(self) -> str:
        return f"Teacher({self.describe()})"


class Ready:
    """Outputs that are there already."""

    def __init__(self, outputs: object) -> None:
        self._outputs = outputs

    def result(self) -> Any:
        """The outputs."""
        return self._outputs


def open_teacher(
    ground: Ground, build: Build | str | Path, weights: str | Path | None, placement: str | None, wish: TeacherOptions
) -> Teacher:
    """Build, check and place a teacher; a common act of all ranks, which succeeds or fails on all."""
    placement = None if placement == "auto" else placement
    check_wish(placement, wish)
    check_weights(weights)
    if wish.device_map is not None:
        placement = "custom"
    frozen = run_on_every_rank(ground.link, "reading the teacher", _freeze, build, weights, wish)
    if wish.example is not None:
        frozen.example, wish = wish.example, replace(wish, example=None)  # a serving process would have no use for it
    check_alike(ground.link, frozen, asked_for(placement, wish))
    if frozen.unused:
        ground.say(
            f"teacher: {len(frozen.unused)} name(s) of {frozen.weights.path} are not in the module and stay unused, "
            f"e.g. {frozen.unused[:SHOWN]}"
        )
    stopwatch = None
    if placement is None:
        choice = choose_placement(ground, frozen, wish)
        placement, stopwatch = choice.placement, Stopwatch(ground.device, choice.seconds, ground.say)
    placed = place_function(placement)(ground, frozen, wish)
    ground.say(f"teacher: {placed.describe()}")
    return Teacher(placed, placement, frozen, ground, wish, stopwatch)


def place_function(placement: str) -> Place:
    """The function that brings a teacher into a place."""
    module, _, name = PLACEMENTS[placement].partition(":")
    return getattr(importlib.import_module(module), name)


def _note_dtypes(error: Exception, weights: set[torch.dtype], inputs: object) -> None:
    """Say so where a call has failed and an input is of another dtype than all weights: torch names neither."""
    given = {leaf.dtype for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}
    own = sorted(str(dtype) for dtype in weights if dtype.is_floating_point)
    if own and (other := sorted(map(str, given - weights))):
        error.add_note(
            f"the teacher's weights are {', '.join(own)} and its inputs here {', '.join(other)}: give inputs with "
            f".to({own[0]}), or run.teacher(..., dtype={other[0]})"
        )


def _freeze(build: Build | str | Path, weights: str | Path | None, wish: TeacherOptions) -> FrozenModel:
    if isinstance(build, torch.nn.Module):
        raise TeacherError(
            f"build={type(build).__name__}(...) is a module and already takes memory on every rank: pass the function "
            f"that makes it, e.g. build=lambda: {type(build).__name__}(...)"
        )
    if isinstance(build, str | Path):
        folder = Path(build).expanduser().absolute()
        if not folder.exists():
            raise TeacherError(
                f"run.teacher({str(build)!r}): there is no such folder here, and nothing is downloaded; give the "
                "folder of a Hugging Face model, which `hf download NAME --local-dir FOLDER` fetches from the hub"
            )
        found = open_weights(folder if weights is None else weights)
        make, unused = build_from_folder(folder, found, wish.dtype)
        return FrozenModel(make, found, unused)
    if weights is None:
        raise TeacherError(
            "a teacher needs weights=: a .safetensors file, a folder of shards, or a Hugging Face folder"
        )
    if not callable(build):
        raise TeacherError(f"build={build!r} is no function: pass one that makes the teacher's module")
    return FrozenModel(build, open_weights(weights))
