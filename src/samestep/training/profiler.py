"""`run.profile`: a trace of some steps for Perfetto or Chrome, and a table of their slowest operations.

torch's profiler records operations and kernels. The steps and their phases (data, forward, backward, optimizer) are
separate rows: `StepTimes` knows the phases, which begin in other threads too, for example in that of a backward
pass on a GPU, so they are added to the trace when it is written.
"""

import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import IO, Final

import torch
from torch.profiler import ProfilerActivity, profile

from samestep.disk import describe_os_error, write_atomically
from samestep.distributed.step_times import PHASES, Phase
from samestep.environment.world import export, read_environ
from samestep.errors import ConfigError
from samestep.messages import format_list, warn
from samestep.training.step_loop import StepLoop

FOLDER: Final = "profile"
"""In the folder of a run, that of its traces and tables."""
_ROWS, _NAME_WIDTH = 30, 60  # of the table
_EVENTS: Final = '"traceEvents": ['  # after it come the events of torch's trace
_BASE: Final = '"baseTimeNanoseconds": '
_HEAD: Final = 1 << 16  # characters: the head of a trace is before this
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_PROCESS: Final = "samestep"  # a name sorts its rows below those of torch's threads
_Mark = tuple[str, int]  # a phase, or a step, and when it began, in ns since 1970


class StepProfiler:
    """Records some steps of this rank with torch's profiler; consecutive steps have one trace and one table.

    It is in the hook lists of the step loop until the last of its steps is over.
    """

    def __init__(
        self, loop: StepLoop, steps: Collection[int], ranks: Collection[int], shapes: bool, memory: bool, stack: bool
    ) -> None:
        self._loop, self._context = loop, loop.context
        self._left, self._ranks = set(steps), sorted(set(ranks))
        self._records = self._context.world.rank in self._ranks
        self._shapes, self._memory, self._stack = shapes, memory, stack
        self._trained: tuple[int, int] | None = None  # the first and the last step of this process
        self._recorded: list[int] = []  # the steps of the current trace
        self._profile: profile | None = None
        self._marks: list[_Mark] = []
        loop.before_step.append(self._begin_step)
        loop.after_step.append(self._end_step)
        self._context.on_close.append(self._close)

    def _begin_step(self, number: int) -> None:
        first = number if self._trained is None else self._trained[0]
        self._trained = first, number
        if number not in self._left:
            self._finish()  # the step before was left by `break`
            return
        if not self._recorded and self._records:
            self._start()
        self._recorded.append(number)
        self._left.discard(number)
        self._marks.append((f"step {number}", time.time_ns()))

    def _end_step(self, number: int) -> None:
        if not self._recorded:
            return
        self._marks.append(("", time.time_ns()))
        if number + 1 not in self._left:
            self._finish()

    def _start(self) -> None:
        device = self._context.device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)  # what earlier steps started does not belong to this one
        export({_LOG_LEVEL: read_environ().get(_LOG_LEVEL, "99")})  # else it logs to stderr that it starts and stops
        self._profile = profile(
            activities=activities, record_shapes=self._shapes, profile_memory=self._memory, with_stack=self._stack
        )
        self._profile.start()
        self._context.times.observer = self._follow

    def _follow(self, phase: Phase) -> None:
        self._marks.append((phase, time.time_ns()))

    def _finish(self) -> None:
        """Write what was recorded; all ranks get here in the same step."""
        steps, self._recorded = self._recorded, []
        marks, self._marks = self._marks, []
        recorded, self._profile = self._profile, None
        if not steps:
            return
        marks.append(("", time.time_ns()))  # the last step may have been left by an exception
        context = self._context
        with context.times.phase("logging"):
            if recorded is not None:
                context.times.observer = None
                recorded.stop()  # waits for the GPU
            if recorded is None or self._try_to_write(recorded, steps, marks):
                files = [f"{FOLDER}/{file_name(rank, steps)}.json.gz" for rank in self._ranks]
                context.record("profile", steps=[steps[0], steps[-1]], ranks=self._ranks, files=files)
                context.print(
                    f"profile of {format_steps(steps)} of {format_list([f'rank {rank}' for rank in self._ranks], 8)}: "
                    "traces for https://ui.perfetto.dev, and tables of the slowest operations, in "
                    f"{context.folder / FOLDER}"
                )
        if not self._left:
            self._detach()

    def _try_to_write(self, recorded: profile, steps: list[int], marks: list[_Mark]) -> bool:
        """Write the trace and the table; warn if the disk refuses them, since a profile is not worth ending a run."""
        try:
            self._write(recorded, steps, marks)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)  # torch does not raise if it could not write its trace
            cause = "the disk may be full: free some space" if is_missing else describe_os_error(error)
            warn(
                f"the profile of {format_steps(steps)} of rank {self._context.world.rank} cannot be written to "
                f"{self._context.folder / FOLDER}: {cause}; training continues without it"
            )
            return False
        return True

    def _write(self, recorded: profile, steps: list[int], marks: list[_Mark]) -> None:
        world, device = self._context.world, self._context.device
        folder, name = self._context.folder / FOLDER, file_name(world.rank, steps)
        folder.mkdir(parents=True, exist_ok=True)
        plain, packed, unfinished = (folder / f"{name}.part.{kind}" for kind in ("json", "gz", "json.tmp"))
        try:
            recorded.export_chrome_trace(str(plain))
            # names of files may be in other encodings
            with (
                plain.open(encoding="utf-8", errors="surrogateescape") as source,
                gzip.open(packed, "wt", compresslevel=5, encoding="utf-8", errors="surrogateescape") as target,
            ):
                write_with_phases(source, target, marks)
            packed.replace(folder / f"{name}.json.gz")
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # on a full disk torch leaves this file, and keeps it open
                os.truncate(unfinished, 0)
                unfinished.unlink()
        order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"  # none on Apple GPUs
        table = recorded.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
        head = f"{format_steps(steps)} of rank {world.rank} of {world.size} on {device.type}\n{_phase_line(marks)}\n\n"
        write_atomically(folder / f"{name}.txt", f"{head}The slowest operations, by their own time:\n{table}")

    def _close(self) -> None:
        self._finish()
        if self._left and sys.exc_info()[0] is None:  # a run that failed is not asked for its later steps
            first_to_last = "no steps" if self._trained is None else format_steps([*self._trained])
            self._context.warn_once(
                f"run.profile has not recorded {format_steps(sorted(self._left))}: this process has trained "
                f"{first_to_last}, and steps count from 0 over all epochs and restarts; choose others"
            )
        self._detach()

    def _detach(self) -> None:
        for hooks, hook in (self._loop.before_step, self._begin_step), (self._loop.after_step, self._end_step):
            if hook in hooks:
                hooks.remove(hook)


def open_profiler(
    loop: StepLoop,
    steps: Iterable[int],
    ranks: Iterable[int] = (0,),
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> None:
    """Record these steps on these ranks, each step once; raises ConfigError for numbers that no run has."""
    chosen, of_ranks, size = list(steps), list(ranks), loop.context.world.size
    if not chosen or not all(_is_number(step) for step in chosen):
        raise ConfigError(
            f"run.profile got steps={steps!r}: pass at least one step, counted from 0, as in steps=range(10, 13)"
        )
    if not of_ranks or not all(_is_number(rank) and rank < size for rank in of_ranks):
        raise ConfigError(f"run.profile got ranks={ranks!r}: pass some of the ranks 0 to {size - 1}")
    if twice := sorted(loop.profiled_steps.intersection(chosen)):
        loop.context.warn_once(
            f"run.profile records {format_steps(twice)} once, with the ranks and options of the first call, or of "
            "`samestep run --profile`: profile each step once"
        )
    if left := set(chosen) - loop.profiled_steps:
        loop.profiled_steps |= left
        StepProfiler(loop, left, of_ranks, record_shapes, profile_memory, with_stack)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def file_name(rank: int, steps: list[int]) -> str:
    """The name of the files of a trace, without suffix."""
    return f"rank-{rank}-steps-{steps[0]}-{steps[-1]}"


def format_steps(steps: list[int]) -> str:
    """For messages: `step 3`, or `steps 3 to 5`; for steps with gaps, the first and the last."""
    return f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"


def write_with_phases(source: IO[str], target: IO[str], marks: list[_Mark]) -> None:
    """Copy a trace of torch, with rows for the steps and their phases.

    The events are inserted as text, since a trace of a large model has hundreds of megabytes.
    """
    head = source.read(_HEAD)
    before, found, after = head.partition(_EVENTS)
    base = before.partition(_BASE)[2].partition(",")[0]
    target.write(before + found)
    if found and base.strip().isdecimal():
        target.writelines(json.dumps(event) + ",\n" for event in phase_events(marks, int(base)))
    target.write(after)
    shutil.copyfileobj(source, target)


def phase_events(marks: list[_Mark], base: int) -> Iterator[dict[str, object]]:
    """The events of a trace for steps and phases; `base` is its time 0, in ns since 1970."""
    step: _Mark | None = None
    for (name, began), (_, ended) in pairwise([*marks, ("", marks[-1][1] if marks else 0)]):
        if name in PHASES and step is not None:
            yield _event("phases", name, began, ended, base)
        elif step is not None:
            yield _event("steps", step[0], step[1], began, base)
        if name not in PHASES:
            step = (name, began) if name else None


def _event(row: str, name: str, began: int, ended: int, base: int) -> dict[str, object]:
    start, duration = (began - base) / 1000, (ended - began) / 1000  # microseconds
    return {"ph": "X", "cat": row, "name": name, "pid": _PROCESS, "tid": row, "ts": start, "dur": duration}


def _phase_line(marks: list[_Mark]) -> str:
    """How long the host was in each phase, per step."""
    seconds: dict[str, float] = {}
    steps = 0
    for event in phase_events(marks, 0):
        duration = event["dur"]
        assert isinstance(duration, float)
        steps += event["cat"] == "steps"
        if event["cat"] == "phases":
            seconds[str(event["name"])] = seconds.get(str(event["name"]), 0.0) + duration / 1000
    shown = ", ".join(f"{name} {total / max(steps, 1):.2f}" for name, total in seconds.items())
    return f"Milliseconds of the host per step: {shown}"
