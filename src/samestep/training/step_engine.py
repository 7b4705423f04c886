"""What happens around a step: when gradients travel, when ranks tell each other, what is counted and logged."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from samestep.data.ledger import ShardLedger
from samestep.distributed.communicator import Communicator
from samestep.errors import StepError
from samestep.messages import warn
from samestep.parallel.acceleration import Acceleration
from samestep.parallel.batchnorm import min_rows
from samestep.parallel.replica_check import check_replicas, replicated
from samestep.parallel.wrapped_model import WrappedModel, check_optimizer, local_tensor
from samestep.teacher.teacher import Teacher
from samestep.torch_private import multiply_all
from samestep.training.auto_plan import RunPlan
from samestep.training.finite import all_finite
from samestep.training.metric_sync import MetricSync, Row, Writer
from samestep.training.padding import Padding
from samestep.training.step import Step

_SPEED_SECONDS = 1.0  # a speed over less than this is noise
_UNWEIGHED = (
    "a mean that was taken by hand counts padding, and ranks and micro-batches of different size alike, so results "
    "depend on the number of ranks; write step.mean(losses).backward(), with one loss a sample (reduction='none')"
)


class RunEngine:
    """The part of a run that follows its steps."""

    def __init__(
        self,
        link: Communicator,
        device: torch.device,
        writer: Writer | None,
        replica_check_every: int,
        speed: Acceleration,
    ) -> None:
        self._link, self._device, self._writer, self._check_every = link, device, writer, replica_check_every
        self.speed, self.padding = speed, Padding()
        self.models: list[WrappedModel] = []
        self.accounts: list[ShardLedger] = []
        self.trained = weakref.WeakSet[object]()
        self.pulse = MetricSync(link)
        self.current: Step | None = None
        self.said: set[str] = set()
        self.at_end: list[Callable[[], None]] = [self.pulse.close]
        self.teachers: list[Teacher] = []
        self.epoch = self.steps = self.stepped = self.samples = self.shards = self.rows = 0
        self.decisions: list[RunPlan] = []
        self.moments: deque[float] = deque(maxlen=500)
        self.lockstep = self.in_step = False
        self._own: dict[Row, float] = {}
        self._optimizers: list[Optimizer] = []
        self._abandoned: Step | None = None
        self._since, self._samples_since = time.monotonic(), 0
        self._hooks = _watch_optimizers(self)

    @property
    def size(self) -> int:
        """The world size."""
        return self._link.world.size

    @property
    def loss_scale(self) -> float:
        """The factor that losses carry through the backward pass; 1 but for fp16."""
        return 1.0 if self.speed.scale is None else self.speed.scale.on_rank

    @property
    def fewest_rows(self) -> int:
        """How few rows a micro-batch may have: 0 where padding does no harm, more where BatchNorm should not see it."""
        return max((min_rows(model.norms) for model in self.models), default=0)

    @property
    def step_number(self) -> int:
        """The number of the step under way or last done."""
        return self.current.number if self.current is not None else self.steps

    def close(self) -> None:
        """Write what is pending and let go of the optimizers."""
        for rider in self.pulse.riders:
            rider.ended(failed=False)
        self.flush("Run.close")
        self.detach(failed=False)

    def detach(self, failed: bool) -> None:
        """Let go of the optimizers and close the ledgers, without a word to the other ranks."""
        with ExitStack() as ending:  # each of these happens, whatever another raises
            ending.callback(self.speed.close)
            for act in self.at_end:
                ending.callback(act)
            for account in self.accounts:
                ending.callback(account.close, failed)
            for rider in self.pulse.riders if failed else ():
                ending.callback(rider.ended, failed=True)
            for hook in self._hooks:
                ending.callback(hook.remove)

    def expect(self, total: int, start: int) -> None:
        """Tell how far training will go, for the bar and the time left."""
        if self._writer is not None:
            self._writer.expect(total, start)

    def hand_out(self, step: Step) -> Iterator[Step]:
        """Yield a step once, and know when the body of the user's loop is over, also where it is left for good."""
        self.current, self._abandoned, self.in_step = step, None, True
        self.moments.append(time.perf_counter())
        try:
            yield step
        finally:
            self.in_step = False
        step.drain()

    def begin_micro_batches(self) -> None:
        """Called before the first micro-batch: gradients that stand get the factor that the coming ones carry."""
        if self.speed.scale is not None:
            self.speed.scale.begin(self.models)

    def begin_micro_batch(self, last: bool) -> None:
        """Let gradients travel with the last micro-batch only."""
        for model in self.models:
            model.sync(last)
        if not any(model.sharded for model in self.models):  # those have a policy of their own
            self.speed.open_forward()

    def loss_known(self) -> None:
        """Called when a micro-batch's loss is computed."""
        self.speed.close_forward()

    def end_micro_batches(self, step: Step) -> None:
        """Called when all micro-batches of a step are done, before the optimizer's turn."""
        self.speed.close_forward()
        _average_again(self.models, step.number)
        _check_learnt(step, self.models, self._link.world.rank, self.said)
        self.speed.settle(self.models, step.number)
        self.steps, self.stepped, self.samples = step.number + 1, self.stepped + 1, self.samples + step.samples
        self._samples_since += step.samples
        if (loss := step.loss) is not None:
            self.pulse.pending.values[step.number, "train/loss"] = loss  # a good name and a good step: no check

    def abandon_step(self, step: Step) -> None:
        """A step left early: its gradients are of some micro-batches and some ranks only, so they are dropped."""
        self._abandoned = step
        self.speed.close_forward()
        for model in self.models:
            model.forget()

    def end_step(self, step: Step) -> None:
        """Called when the body of the user's loop is over: a boundary that all ranks reach."""
        self._link.stepping()
        if self._writer is not None:
            self._writer.advance(self.steps)
        if self._check_every and (step.number + 1) % self._check_every == 0 and not self._link.alone:
            check_replicas(self._link, replicated(self.models, self._optimizers), f"after step {step.number}")
        if (averages := self.pulse.step()) is not None:
            for model in self.models:
                model.check_unchanged()
            for account in self.accounts:
                account.flush()
            self._write(averages, speed_at=step.number)
        for rider in self.pulse.riders:
            rider.reached(self.steps)

    def flush(self, act: str) -> None:
        """Bring pending values together now, on all ranks."""
        # Where saves come quicker than the pulse, they are the pulse: the speed is told as often as ever.
        late = self._samples_since and time.monotonic() - self._since >= _SPEED_SECONDS
        self._write(self.pulse.beat(act), speed_at=self.steps - 1 if late else None)

    def total(self, count: torch.Tensor) -> float:
        """The sum of a count over all ranks."""
        return sum(float(part[0]) for part in self._link.exchange("step.mean", [float(count)]))

    def exchange_counts(self, act: str, count: int) -> list[int]:
        """A whole number of every rank, such as its samples in a step of a stream."""
        return [int(part[0]) for part in self._link.exchange(act, [float(count)])]

    def has_gradients(self) -> bool:
        """Whether a gradient other than zero stands on this rank."""
        return any(bool(local_tensor(gradient).any()) for model in self.models for gradient in model.gradients())

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient."""
        for model in self.models:
            multiply_all(list(model.gradients()), factor)

    def finite(self, step: Step) -> bool:
        """Whether this step's gradients are finite on all ranks; a warning of the first rank tells where not."""
        if self.speed.scale is not None and self.speed.scale.dropped:
            return False  # as was said when its gradients were dropped
        return all_finite(self._link, step, self.models)

    def _write(self, averages: Mapping[Row, float], speed_at: int | None = None) -> None:
        if self._writer is None:
            return
        records = {**self._own, **averages}
        self._own = {}
        if speed_at is not None and self._samples_since:
            now = time.monotonic()
            records[speed_at, "train/samples_per_s"] = self._samples_since / max(now - self._since, 1e-9)
            self._since, self._samples_since = now, 0
            if self._device.type == "cuda":
                records[speed_at, "train/memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        if records:
            self._writer.write(records)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Called before any optimizer steps: in a training step it must be one of the wrapped models'."""
        if not self.in_step:
            return
        if (left := self._abandoned) is not None:
            raise StepError(
                f"step {left.number} was left before its last micro-batch, and then {type(optimizer).__name__}.step() "
                "was called: its gradients are not those of the global batch and were dropped; to skip a step, "
                "`continue` with the next one"
            )
        if self.current is not None and self.current.under_way and (len(self.current) > 1 or self.speed.scale):
            raise StepError(
                f"{type(optimizer).__name__}.step() was called inside the loop over the micro-batches of step "
                f"{self.current.number}: its gradients are complete after the loop; call it there"
            )
        if not any(optimizer is known for known in self._optimizers):
            check_optimizer(optimizer, self.models)
            for model in self.models:
                model.check_unchanged()
            self._optimizers.append(optimizer)
            self.speed.meet(optimizer)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Called after any optimizer has stepped: its learning rates belong to the step's record."""
        if self._writer is None or self.current is None or not self.in_step:
            return
        which = next(at for at, known in enumerate(self._optimizers) if known is optimizer)
        self._own.update({(self.current.number, name): rate for name, rate in _rates(which, optimizer)})


def _average_again(models: Sequence[WrappedModel], number: int) -> None:
    for model in models:
        model.average_again(number)


def _check_learnt(step: Step, models: Sequence[WrappedModel], rank: int, said: set[str]) -> None:
    """Raise where parameters were left unused; say once where a loss was learnt from that nothing has weighed."""
    learnt = [model.check_use(step.number, step.last_samples, rank) for model in models]
    if not any(learnt) or step.weighed or rank or _UNWEIGHED in said:
        return
    said.add(_UNWEIGHED)
    warn(f"step {step.number} went through a backward pass without step.mean or step.sum: {_UNWEIGHED}")


def _rates(which: int, optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    """The learning rate of every parameter group, by name."""
    prefix = "train/learning_rate" if which == 0 else f"train/learning_rate/optimizer{which}"
    groups = optimizer.param_groups
    for at, group in enumerate(groups):
        yield prefix if len(groups) == 1 else f"{prefix}/{at}", float(group["lr"])


def _watch_optimizers(engine: RunEngine) -> list[RemovableHandle]:
    """Hear of every optimizer's step, without keeping alive a run that was dropped and never closed."""
    held = weakref.ref(engine)

    def before(optimizer: Optimizer, *_: object) -> None:
        """Pass it on, if there still is somebody."""
        if (live := held()) is not None:
            live.before_optimizer(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        """Pass it on, if there still is somebody."""
        if (live := held()) is not None:
            live.after_optimizer(optimizer)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
