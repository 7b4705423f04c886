"""Checkpoints of a run, saved on request, every N steps or every N minutes, while training continues.

The way of a tensor: `Checkpoint.save` collects the state of all parts (parts.py) and copies this rank's chunks to host
memory (tensor_storage.py). A thread writes them to a file per rank, and rank 0 publishes the folder with its manifest
(save.py, manifest.py, checkpoint_folder.py). `run.checkpoint` loads them on any world size (restore.py).
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Final

from samestep.checkpoint import checkpoint_folder
from samestep.checkpoint.checkpoint_folder import Retention
from samestep.checkpoint.export import pretrained_to_json
from samestep.checkpoint.manifest import HistoryEntry, Manifest, disk_error
from samestep.checkpoint.parts import Parts, Tensors, describe_state_error, encode, get_rng_state, rng_tensor_name
from samestep.checkpoint.save import BackgroundSave
from samestep.checkpoint.tensor_storage import HostStaging
from samestep.context import RunContext
from samestep.distributed.communicator import check_pause
from samestep.distributed.metric_sync import StepCallback
from samestep.distributed.once import run_on_every_rank
from samestep.errors import CheckpointError, LogError
from samestep.loggers.loggers import check_log_step
from samestep.messages import WarnOnce
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.fsdp import local_tensor

_WAIT_AFTER_FAILURE_SECONDS: Final = 30.0
# An estimate for the first save: Adam has two values per weight, and a shared disk may be slow.
_STATE_PER_WEIGHT: Final = 3
_BYTES_PER_SECOND: Final = 1e8
_NO_POSITION: Final = (
    "this checkpoint does not contain the position in the training data: a resumed run would start with the first "
    "samples again, and they would count twice; pass the shard or stream too, for example "
    "run.checkpoint(folder, model=model, train=train)"
)


class Checkpoint(StepCallback):
    """Saves the parts that run.checkpoint received; created by run.checkpoint."""

    def __init__(
        self,
        context: RunContext,
        parts: Parts,
        retention: Retention,
        token: str,
        restored: tuple[Path, Manifest] | None,
    ) -> None:
        self._context, self._retention = context, retention
        self._token = token  # in the names of unpublished folders; unique per run, the same on all ranks
        self.folder = retention.folder
        """The folder of the checkpoints."""
        self.parts = parts
        """What they contain."""
        self.restored: Path | None = None if restored is None else restored[0]
        """The checkpoint from which training resumed; None if it started from the beginning."""
        self._history = [] if restored is None else restored[1].history
        self._last_number: int | None = None  # that of the last checkpoint if the script passes its own numbers
        if restored is not None and restored[1].step != context.progress.steps:
            self._last_number = restored[1].step
        self._first_step = self._saved_step = context.progress.steps
        self._saved_at, self._saved_name, self._saves = time.monotonic(), "", 0
        self._every_steps, self._every_minutes = 0, 0.0
        self._requested, self._requested_step = False, None
        self._minutes_elapsed = self._write_failed = False
        self._save_seconds = 0.0
        self._staging = HostStaging(context.world.rank)
        self._current: BackgroundSave | None = None
        self._reported: BackgroundSave | None = None
        self._metric_count = 0  # how often the metric `keep_best` was logged before the last save
        self._warnings = WarnOnce()
        context.callbacks.append(self)

    def every(self, *, steps: int | None = None, minutes: float | None = None) -> None:
        """Save automatically after every `steps` steps, and after every `minutes` minutes by the clock of rank 0."""
        self._context.comm.refuse_inside_once("checkpoint.every")
        given = [value for value in (steps, minutes) if value is not None]
        # NaN fails the comparison, too
        are_positive = all(isinstance(value, Real) and 0 < float(value) < math.inf for value in given)
        if not given or not are_positive or not isinstance(steps or 0, Integral):
            raise CheckpointError(
                f"checkpoint.every(steps={steps!r}, minutes={minutes!r}) is not an interval: pass a positive integer, "
                "for example every(steps=1000), or a positive number of minutes, for example every(minutes=30)"
            )
        self._every_steps, self._every_minutes = steps or 0, minutes or 0.0

    def save(self, step: int | None = None) -> None:
        """Save now; call it on every rank. Training waits while tensors are copied, and a thread writes them.

        Inside the body of a step samestep saves when the step ends, so that data, weights and ledger agree. `step` is
        the number in the name, by default the steps done, and must not be below that of an existing checkpoint.
        """
        self._context.comm.refuse_inside_once("checkpoint.save")
        if step is not None:
            try:
                step = check_log_step(step)
            except LogError as error:
                raise CheckpointError(f"checkpoint.save: {error}, or omit it to use the steps done") from error
        if self._context.progress.in_step:
            self._requested, self._requested_step = True, step
        else:
            self._save(step)

    def wait(self) -> None:
        """Wait until the last save is published; if it failed on one rank, raise CheckpointError on every rank."""
        save, self._current, self._write_failed = self._current, None, False
        if save is None:
            return
        comm = self._context.comm
        with self._context.times.phase("checkpoint"), comm.collective("checkpoint.wait"):
            since, seen = time.monotonic(), {}
            while save.is_running:
                save.wait(check_pause(since, seen))
                if save.is_running and not comm.alone:
                    seen = comm.check_peers(since, seen, comm.start_timeout)
        self._save_seconds = max(self._save_seconds, save.seconds)
        self._report(save)
        if save.error is not None:
            raise CheckpointError(save.error)

    # what a StepCallback does

    def on_step_end(self, steps: int) -> None:
        """Save if `save` was called inside the step or if a save is due; raise if writing failed on any rank."""
        if self._write_failed:
            self.wait()
        elif self._current is not None and not self._current.is_running:
            self._report(self._current)
        # a skipped step does not change the count, and must not save the same state twice
        steps_elapsed = bool(self._every_steps) and steps % self._every_steps == 0 and steps != self._saved_step
        if self._requested or steps_elapsed or self._minutes_elapsed:
            self._save(self._requested_step, automatic=not self._requested)

    def on_run_end(self, failed: bool) -> None:
        """Finish the pending saves; after a failure wait only for a limited time."""
        if not failed:
            if self._requested:
                self._save(self._requested_step)
            self.wait()
        elif self._current is not None:
            self._current.abandon()
            self._current.wait(_WAIT_AFTER_FAILURE_SECONDS)

    def save_before_exit(self) -> str:
        """Save the state of this step before the run ends early, wait until it is published, and return its name."""
        if self._requested:
            self._save(self._requested_step)
        elif not self._saves or self._saved_step != self._context.progress.steps:
            # with the last number it is newer than the last checkpoint and older than the next
            self._save(self._last_number, automatic=True, preempted=self._last_number is None)
        self.wait()
        return self._saved_name

    def save_seconds(self) -> float:
        """Return the duration of the slowest save so far, or an estimate from the size of the models."""
        if not self._save_seconds:
            parameters = (parameter for model in self._context.models for parameter in model.inner.parameters())
            weight_bytes = sum(local_tensor(parameter).nbytes for parameter in parameters)
            self._save_seconds = _STATE_PER_WEIGHT * weight_bytes / _BYTES_PER_SECOND
        return self._save_seconds

    def sync_value(self) -> float:
        """Return 1 if the interval of minutes has elapsed, plus 2 if writing failed."""
        elapsed = bool(self._every_minutes) and time.monotonic() - self._saved_at >= 60 * self._every_minutes
        return 2.0 * self.wants_sync() + elapsed

    def wants_sync(self) -> bool:
        """Whether writing failed on this rank."""
        save = self._current
        return save is not None and not save.is_running and save.error is not None

    def on_sync(self, values: Sequence[float]) -> None:
        """Store for the next step boundary whether writing failed on any rank, and whether a save is due on rank 0."""
        self._write_failed = self._write_failed or any(value >= 2 for value in values)
        self._minutes_elapsed = self._minutes_elapsed or values[0] % 2 == 1

    # Saving

    def _report(self, save: BackgroundSave) -> None:
        """Record a finished save and print what it has to say, once; only rank 0 has a message."""
        if save is not self._reported:
            self._reported = save
            self._context.record("checkpoint", **save.describe())
        if save.message:
            self._context.print(save.message)
            save.message = None

    def _save(self, step: int | None, automatic: bool = False, preempted: bool = False) -> None:
        with self._context.times.phase("checkpoint"):
            self._save_parts(step, automatic, preempted)

    def _save_parts(self, step: int | None, automatic: bool, preempted: bool) -> None:
        """Collect the state, copy it to host memory, and start the thread that writes and publishes it; a collective.

        `automatic`: due by `every` or saved before an early exit. `preempted`: numbered without knowing how the script
        numbers its checkpoints.
        """
        context, comm = self._context, self._context.comm
        self.wait()
        started = time.monotonic()
        # A resumed run does not log these steps again, and keep_best needs the latest value.
        context.flush_metrics("checkpoint.save")
        self._requested, self._requested_step, self._minutes_elapsed = False, None, False
        if context.world.is_main and _lacks_position(context):
            self._warnings.warn_once(_NO_POSITION)
        number = context.progress.steps if step is None else step
        for rank, (other,) in enumerate(comm.exchange("checkpoint.save", [float(number)])):
            if int(other) != number:
                raise CheckpointError(
                    f"rank {comm.world.rank} saves step {number} and rank {rank} saves step {int(other)}: all ranks "
                    "must save the same step; call checkpoint.save at the same point on every rank"
                )
        context.replicas.check(f"before the checkpoint of step {number}", context.progress.steps_of_process)
        self._prepare_parts()
        state, tensors, name = run_on_every_rank(
            comm, "checkpoint.save", CheckpointError, self._collect, number, describe=describe_state_error
        )
        name, ledger = context.gather_ledgers("checkpoint.save", name)
        self._stage(tensors)
        self._saves += 1
        self._current = BackgroundSave(
            comm=comm,
            store_prefix=f"checkpoint/{self._token}",
            number=self._saves,
            staged=self._staging,
            state=state,
            manifest=self._manifest(number, ledger, automatic, preempted),
            writing=checkpoint_folder.writing_folder(self.folder, number, self._token),
            published=self.folder / name,
            retention=self._retention,
            started=started,
        )
        self._saved_at, self._saved_step, self._saved_name = time.monotonic(), context.progress.steps, name
        self._last_number = None if number == context.progress.steps else number

    def _prepare_parts(self) -> None:
        """What must be combined over the ranks before the state is collected."""
        # running statistics differ between ranks, and only one rank's are saved; parts may be averages of models
        for module in dict.fromkeys([*(model.inner for model in self._context.models), *self.parts.models.values()]):
            average_running_stats(self._context.comm, module)
        gather_states(self._context, self.parts, "checkpoint.save")

    def _stage(self, tensors: Tensors) -> None:
        """Copy this rank's chunks to host memory; DCP plans again only if the layout of a tensor has changed."""
        comm, staging = self._context.comm, self._staging
        if all(has_plan for (has_plan,) in comm.exchange("checkpoint.save", [float(staging.has_plan(tensors))])):
            run_on_every_rank(
                comm, "checkpoint.save", CheckpointError, staging.stage_again, tensors, describe=_describe_staging_error
            )
        else:
            staging.stage(tensors, comm.alone)

    def _collect(self, number: int) -> tuple[dict[str, object], Tensors, str]:
        """Return the state of this rank and, on rank 0, the name of the checkpoint."""
        context = self._context
        state, tensors = self.parts.state()
        tensors[rng_tensor_name(context.world.rank)] = get_rng_state(context.device)
        for ledger in context.ledgers:
            ledger.sync()  # the ledger must contain every sample that the checkpoint has trained on
        size = sum(tensor.nbytes for tensor in tensors.values())
        return state, tensors, self._create_folder(number, size) if context.world.is_main else ""

    def _create_folder(self, number: int, needed: int) -> str:
        """On rank 0: create the folder to write to, and return the name under which it will be published."""
        writing = checkpoint_folder.writing_folder(self.folder, number, self._token)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._saves:
                checkpoint_folder.remove_leftovers(self.folder, self._token)
            checkpoint_folder.check_number(self.folder, number, self._retention.corrupt)
            checkpoint_folder.check_free_space(self.folder, needed)
            if writing.exists():  # a failed save that could not be removed
                checkpoint_folder.remove_folder(writing)
            writing.mkdir()
        except OSError as error:
            raise disk_error(error, f"creating a checkpoint in {self.folder}") from error
        return checkpoint_folder.unused_name(self.folder, number)

    def _manifest(self, number: int, ledger: dict[str, object], automatic: bool, preempted: bool) -> Manifest:
        context = self._context
        summary = context.summary("saved")
        versions, metrics = summary["versions"], summary["metrics"]
        assert isinstance(versions, dict)
        assert isinstance(metrics, dict)
        current = HistoryEntry(context.world.size, self._first_step, context.progress.steps, versions)
        if ledger:
            summary["ledger"] = ledger
        if context.world.is_main and (pretrained := pretrained_to_json(self.parts.models)):
            summary["pretrained"] = pretrained
        if preempted:
            summary[checkpoint_folder.NUMBERED_ON_PREEMPTION] = True
        # The manifest is strict JSON, without NaN.
        run = encode(json.loads(json.dumps(summary, default=str)), "run", {})
        assert isinstance(run, dict)
        return Manifest(
            step=number,
            samples=context.progress.samples,
            saved_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            history=[*self._history, current],
            parts=self.parts.kinds,
            run=run,
            metric=self._best_metric(metrics, automatic) if context.world.is_main else None,
        )

    def _best_metric(self, metrics: Mapping[str, float], automatic: bool) -> tuple[str, float] | None:
        """Return name and value of the metric `keep_best`, or None if it was not logged since the previous checkpoint.

        An `automatic` save can come before the first evaluation, so a missing metric is then not a reason to warn.
        """
        name = self._retention.keep_best
        if name is None:
            return None
        previous, self._metric_count = self._metric_count, self._context.log_count(name)
        if name not in metrics:
            if not automatic or not all(other.startswith("train/") for other in metrics):
                self._warnings.warn_once(
                    f"keep_best={name!r} cannot rate this checkpoint: no such metric was logged yet (logged: "
                    f"{', '.join(sorted(metrics)) or 'none'}); log it before checkpoint.save()"
                )
            return None
        if self._metric_count == previous:  # the value belongs to older weights
            return None
        if not math.isfinite(metrics[name]):
            self._warnings.warn_once(
                f"keep_best={name!r} cannot rate this checkpoint: {name} is {metrics[name]}, which is never the best"
            )
            return None
        return name, metrics[name]


def gather_states(context: RunContext, parts: Parts, operation: str) -> None:
    """Let parts whose state is that of all ranks gather it: reading the state must not wait; a collective."""
    for part in parts.objects.values():
        if (gatherer := context.state_gatherers.get(id(part))) is not None:
            gatherer.gather_state(operation)


def _describe_staging_error(error: Exception) -> str:
    return f"the state cannot be saved: {type(error).__name__}: {error}"


def _lacks_position(context: RunContext) -> bool:
    """Whether training reads data whose position is in no checkpoint of the run."""
    parts = [each.parts for each in context.callbacks if isinstance(each, Checkpoint)]
    return any(not any(each.may_contain(data) for each in parts) for data in context.training_data)
