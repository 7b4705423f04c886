"""The checkpoints of a run: saved while training goes on, by hand, by steps or by minutes."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Final

from samestep.checkpoint import checkpoint_folder as catalog
from samestep.checkpoint import parts as luck
from samestep.checkpoint.manifest import Manifest, Stage, check_room, explain, remove_folder
from samestep.checkpoint.parts import Parts, Taken, explain_state
from samestep.checkpoint.save import Task, Writing
from samestep.checkpoint.state_encoding import encode
from samestep.checkpoint.tensor_storage import HostMemory
from samestep.context import RunContext
from samestep.distributed.communicator import Communicator
from samestep.errors import CheckpointError, LogError
from samestep.loggers.loggers import check_log_step
from samestep.messages import WarnOnce
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.wrapped_model import local_tensor

_AFTER_FAILURE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 1.0
# How long the first save takes is guessed: Adam keeps two numbers for each weight, and a shared drive may be slow.
_STATE_PER_WEIGHT: Final = 3
_BYTES_PER_SECOND: Final = 1e8
_BEGINS_ANEW: Final = (
    "this checkpoint does not hold how far training is in its data: a run that is started again would begin with the "
    "first samples, which then count twice; give run.checkpoint the shard or stream too, as in run.checkpoint(folder, "
    "model=model, train=train)"
)


@dataclass(frozen=True)
class Rules:
    """What stays and where."""

    folder: Path
    """The folder of checkpoints."""
    keep: int
    """How many of the newest stay."""
    keep_best: str | None
    """The name of the logged value whose best checkpoint stays as well."""
    token: str
    """Tells this writer from those before it."""
    bad: tuple[str, ...]
    """Names of checkpoints that proved damaged."""


class Judge:
    """The value by which keep_best judges a checkpoint: one that was logged since the checkpoint before it."""

    def __init__(self, name: str | None) -> None:
        self._name, self._times, self._voice = name, 0, WarnOnce()

    def rate(self, last: object, times_logged: Callable[[str], int], by_itself: bool) -> tuple[str, float] | None:
        """The name and its value; None where there is none to judge these weights by.

        A checkpoint that is saved `by_itself` may well come before the first evaluation, which is no reason to warn.
        """
        name = self._name
        if name is None:
            return None
        assert isinstance(last, dict)
        before, self._times = self._times, times_logged(name)
        if name not in last:
            if not by_itself or not all(each.startswith("train/") for each in last):
                self._voice.warn_once(
                    f"keep_best={name!r} cannot judge this checkpoint: no such number was logged yet (logged were: "
                    f"{', '.join(sorted(last)) or 'none'}); log it before checkpoint.save()"
                )
            return None
        return self._taken(name, last[name]) if self._times > before else None  # else it is of older weights

    def _taken(self, name: str, value: float) -> tuple[str, float] | None:
        if math.isfinite(value):
            return name, value
        self._voice.warn_once(
            f"keep_best={name!r} cannot judge this checkpoint: {name} is {value}, and such a one is never the best"
        )
        return None


class Checkpoint:
    """Saves the parts that run.checkpoint was given; made by run.checkpoint."""

    def __init__(self, context: RunContext, rules: Rules, parts: Parts, history: Sequence[Stage]) -> None:
        self._context, self._rules, self._history = context, rules, tuple(history)
        self.folder = rules.folder
        """Where its checkpoints lie."""
        self.parts = parts
        """What they hold."""
        self.restored: Path | None = None
        """The checkpoint that training went on from, or None where it began anew."""
        self._first_step = self._saved_at = context.progress.steps
        self._memory = HostMemory(context.comm.world.rank)
        self._writing: Writing | None = None
        self._saves, self._asked, self._step = 0, False, None
        self._steps = self._minutes = self._saving = 0.0
        self._due = self._trouble = self._early = False
        self._since, self._judge, self._name, self._voice = time.monotonic(), Judge(rules.keep_best), "", WarnOnce()
        self.last_number: int | None = None
        """The number of the last checkpoint, where the script does not number them by the steps done."""
        context.callbacks.append(self)

    def every(self, *, steps: int | None = None, minutes: float | None = None) -> None:
        """Save by itself from now on: after so many steps, and after so many minutes on the first rank's clock."""
        _check_times(steps, minutes)
        self._steps, self._minutes = steps or 0, minutes or 0.0

    def save(self, step: int | None = None) -> None:
        """Save now: training waits while tensors are copied, the disk is left to a thread; every rank must call it.

        Inside the body of a step it is done when the step ends, so that data, weights and ledger agree. `step` is the
        number in the name, never below that of a checkpoint which is there; by default the steps done.
        """
        step = None if step is None else _whole(step)
        if self._context.progress.in_step:
            self._asked, self._step = True, step
        else:
            self._save(step)

    def wait(self) -> None:
        """Wait until what was saved is on the disk and published; raise on every rank where it failed on one."""
        writing, self._writing, self._trouble = self._writing, None, False
        if writing is None:
            return
        comm = self._context.comm
        with comm.collective("checkpoint.wait"):
            since, seen = time.monotonic(), {}
            while writing.under_way:
                writing.wait(_LOOK_SECONDS)
                if writing.under_way and not comm.alone:
                    seen = comm.check_peers(since, seen, comm.start_timeout)
        self._saving = max(self._saving, writing.seconds)
        if writing.told:
            self._context.print(writing.told)
        if writing.error is not None:
            raise CheckpointError(writing.error)

    def on_step_end(self, steps: int) -> None:
        """Called at every step boundary."""
        if self._trouble:
            self.wait()
        # a step that was passed over leaves the count where it was
        by_steps = bool(self._steps) and steps % self._steps == 0 and steps != self._saved_at
        if self._asked or by_steps or self._due:
            self._save(self._step, by_itself=not self._asked)

    def on_run_end(self, failed: bool) -> None:
        """Called when the run ends: what was asked for is brought to the disk."""
        if not failed:
            if self._asked:
                self._save(self._step)
            self.wait()
        elif self._writing is not None:
            self._writing.abandon()
            self._writing.wait(_AFTER_FAILURE_SECONDS)

    def save_before_exit(self) -> str:
        """Called before the run ends early: the state of this step is on the disk and published when it returns."""
        if self._asked or not self._saves or self._saved_at != self._context.progress.steps:
            # numbered so that it is newer than the last one and older than the next
            self._early = not self._asked and self.last_number is None
            self._save(self._step if self._asked else self.last_number, by_itself=not self._asked)
        self.wait()
        return self._name

    def save_seconds(self) -> float:
        """About how many seconds a checkpoint takes: as the slowest up to now; before, by size."""
        if not self._saving:
            tensors = (tensor for model in self._context.models for tensor in model.inner.parameters())
            self._saving = (
                _STATE_PER_WEIGHT * sum(local_tensor(tensor).nbytes for tensor in tensors) / _BYTES_PER_SECOND
            )
        return self._saving

    def sync_value(self) -> float:
        """What this rank tells with the pulse: 1 if its time to save has come, 2 if writing has failed."""
        late = bool(self._minutes) and time.monotonic() - self._since >= 60 * self._minutes
        return 2.0 * self.wants_sync() + late

    def wants_sync(self) -> bool:
        """Whether writing has failed."""
        writing = self._writing
        return writing is not None and not writing.under_way and writing.error is not None

    def on_sync(self, values: Sequence[float]) -> None:
        """Take note of what all ranks told; the next step boundary acts on it. The first rank's clock counts."""
        self._trouble = self._trouble or any(word >= 2 for word in values)
        self._due = self._due or values[0] % 2 == 1

    def _save(self, step: int | None, by_itself: bool = False) -> None:
        context = self._context
        self.wait()
        began = time.monotonic()
        # What was logged up to here would be lost with a kill, since nobody trains these steps again; and keep_best
        # judges by it.
        context.flush_metrics("checkpoint.save")
        self._asked, self._step, self._due = False, None, False
        if context.comm.world.is_main and _would_begin_anew(context):
            self._voice.warn_once(_BEGINS_ANEW)
        number = context.progress.steps if step is None else step
        _check_together(context.comm, number)
        for model in context.models:
            average_running_stats(
                context.comm, model.inner
            )  # each rank has seen its own rows, and one rank's are saved
        taken, task_name = self._prepare(number)
        staged = self._memory.stage(taken.tensors, context.comm.alone)
        self._saves += 1
        rules, comm = self._rules, context.comm
        self._writing = Writing(
            Task(
                rank=comm.world.rank,
                size=comm.world.size,
                store=None if comm.alone else comm.store,
                label=f"checkpoint/{rules.token}/{self._saves}",
                folder=rules.folder,
                writing=self._writing_folder(number),
                name=task_name,
                staged=staged,
                values=taken.values,
                manifest=self._manifest(number, by_itself),
                retire=partial(_retire, rules),
            ),
            began,
        )
        self._since, self._saved_at, self._name = time.monotonic(), context.progress.steps, task_name
        self.last_number = None if number == context.progress.steps else number

    def _prepare(self, number: int) -> tuple[Taken, str]:
        """The state of this rank and the name of the checkpoint; what fails on one rank is raised on all."""
        comm, taken, name, error = self._context.comm, Taken({}, {}), "", None
        try:
            taken = self.parts.take()
            taken.tensors[luck.name_of(comm.world.rank)] = luck.take(self._context.device)
            for account in self._context.ledgers:
                account.sync()  # before the position is saved: the ledger knows all that the checkpoint has learnt
            if comm.world.is_main:
                name = self._open_folder(number, sum(tensor.nbytes for tensor in taken.tensors.values()))
        except Exception as failure:  # noqa: BLE001  # a state_dict of the user's may raise anything
            error = explain_state(failure)
        answers = comm.exchange_objects("checkpoint.save", (name, error))
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise CheckpointError(text if comm.alone else f"rank {rank}: {text}")
        return taken, answers[0][0]

    def _open_folder(self, number: int, needed: int) -> str:
        folder = self._rules.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._saves:
                catalog.clean(folder, self._rules.token)
            catalog.check_order(folder, number, self._rules.bad)
            check_room(folder, needed)
            writing = self._writing_folder(number)
            if writing.exists():  # an attempt that failed and could not be cleared away
                remove_folder(writing)
            writing.mkdir()
        except OSError as error:
            raise explain(error, f"making a checkpoint in {folder}") from error
        return catalog.free_name(folder, number)

    def _writing_folder(self, number: int) -> Path:
        return self._rules.folder / f".writing-{catalog.name_of(number)}-{self._rules.token}"

    def _manifest(self, number: int, by_itself: bool) -> Manifest:
        context = self._context
        facts, first = context.summary("saved"), context.comm.world.is_main
        versions = {"samestep": str(facts.get("version")), "torch": str(facts.get("torch"))}
        now = Stage(context.comm.world.size, self._first_step, context.progress.steps, versions)
        if self._early:
            facts[catalog.EARLY] = True
        told = encode(json.loads(json.dumps(facts, default=str)), "run", {})
        assert isinstance(told, dict)
        return Manifest(
            step=number,
            samples=context.progress.samples,
            saved_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            history=[*self._history, now],
            parts=self.parts.kinds,
            run=told,
            metric=self._judge.rate(facts["metrics"], context.log_count, by_itself) if first else None,
        )


def _would_begin_anew(context: RunContext) -> bool:
    """Whether training draws from data whose position no checkpoint of the run holds."""
    parts = [each.parts for each in context.callbacks if isinstance(each, Checkpoint)]
    return any(not any(each.may_hold(source) for each in parts) for source in context.training_data)


def _check_times(steps: object, minutes: object) -> None:
    whole = steps is None or (isinstance(steps, Integral) and int(steps) > 0)
    # a comparison with nan is never true
    sensible = minutes is None or (isinstance(minutes, Real) and 0 < float(minutes) < math.inf)
    if not whole or not sensible or (steps is None and minutes is None):
        raise CheckpointError(
            f"checkpoint.every(steps={steps!r}, minutes={minutes!r}) says no time to save: give steps=, a whole number "
            "as in every(steps=1000), or minutes=, as in every(minutes=30)"
        )


def _check_together(comm: Communicator, number: int) -> None:
    told = [int(part[0]) for part in comm.exchange("checkpoint.save", [float(number)])]
    for rank, theirs in enumerate(told):
        if theirs != number:
            raise CheckpointError(
                f"rank {comm.world.rank} saves step {number} and rank {rank} saves step {theirs}: a checkpoint is "
                "of one step on all ranks; call checkpoint.save at the same place everywhere"
            )


def _retire(rules: Rules, published: Path) -> str | None:
    try:
        top = catalog.retire(rules.folder, published, rules.keep, rules.keep_best, rules.bad)
    except OSError as error:  # no reason to end a training whose state is safe
        return f"an old checkpoint in {rules.folder} could not be removed ({error}): remove it by hand"
    if top != published or rules.keep_best is None:
        return None
    order = "lower" if catalog.is_lower_better(rules.keep_best) else "higher"
    return f"best checkpoint so far: {published.name} by {rules.keep_best} ({order} is better)"


def _whole(step: object) -> int:
    try:
        return check_log_step(step)
    except LogError as error:
        raise CheckpointError(f"checkpoint.save: {error}; without step= it is the steps done") from error
