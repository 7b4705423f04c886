"""What happens around a step: when gradients travel, when ranks tell each other, what is counted and logged."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.errors import StepError
from samestep.run.link import Link
from samestep.run.logs import Row, Writer
from samestep.run.pulse import Pulse
from samestep.run.step import Step


class Trained(Protocol):
    """A wrapped model, as far as steps know it."""

    def sync(self, last: bool) -> None:
        """Let gradients travel in the coming backward pass, or keep them here."""
        ...

    def gradients(self) -> Iterable[torch.Tensor]:
        """The gradients that stand on this rank."""
        ...

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise where an optimizer holds parameters that are no longer the model's."""
        ...


class RunEngine:
    """The part of a run that follows its steps."""

    def __init__(self, link: Link, device: torch.device, writer: Writer | None) -> None:
        self._link, self._device, self._writer = link, device, writer
        self.models: list[Trained] = []
        self.pulse = Pulse(link)
        self.current: Step | None = None
        self.epoch = 0
        self.steps = self.samples = 0
        self.lockstep = False
        self.padding_rows = 0
        self._own: dict[Row, float] = {}
        self._optimizers: list[Optimizer] = []
        self._abandoned: Step | None = None
        self._since, self._samples_since = time.monotonic(), 0
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    @property
    def size(self) -> int:
        """The world size."""
        return self._link.world.size

    @property
    def step_number(self) -> int:
        """The number of the step under way or last done."""
        return self.current.number if self.current is not None else self.steps

    def close(self) -> None:
        """Write what is pending and let go of the optimizers."""
        self.flush("Run.close")
        self.detach()

    def detach(self) -> None:
        """Let go of the optimizers without a word to the other ranks."""
        for hook in self._hooks:
            hook.remove()

    def expect(self, total: int, start: int) -> None:
        """Tell how far training will go, for the bar and the time left."""
        if self._writer is not None:
            self._writer.expect(total, start)

    def begin_step(self, step: Step) -> None:
        """Called when a step is handed out."""
        self.current, self._abandoned = step, None

    def begin_micro_batch(self, last: bool) -> None:
        """Let gradients travel with the last micro-batch only."""
        for model in self.models:
            model.sync(last)

    def end_micro_batches(self, step: Step) -> None:
        """Called when all micro-batches of a step are done, before the optimizer's turn."""
        if step.loss is not None:
            self.pulse.pending.add(step.number, "train/loss", step.loss)

    def abandon_step(self, step: Step) -> None:
        """A step left early: its gradients are of some micro-batches and some ranks only, so they are dropped."""
        self._abandoned = step
        for model in self.models:
            model.sync(last=True)
            for gradient in model.gradients():
                gradient.zero_()

    def end_step(self, step: Step) -> None:
        """Called when the body of the user's loop is over: a boundary that all ranks reach."""
        self.steps, self.samples = step.number + 1, self.samples + step.samples
        self._samples_since += step.samples
        self._link.stepping()
        if self._writer is not None:
            self._writer.advance(self.steps)
        if (averages := self.pulse.step()) is not None:
            self._write(averages, with_speed=True)

    def flush(self, act: str) -> None:
        """Bring pending values together now, on all ranks."""
        self._write(self.pulse.beat(act), with_speed=False)

    def total(self, count: torch.Tensor) -> float:
        """The sum of a count over all ranks."""
        return sum(float(part[0]) for part in self._link.exchange("step.mean", [float(count)]))

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient."""
        for model in self.models:
            for gradient in model.gradients():
                gradient.mul_(factor)

    def finite(self, step: Step) -> bool:
        """Whether this step's gradients are finite on all ranks."""
        raise NotImplementedError

    def _write(self, averages: Mapping[Row, float], with_speed: bool) -> None:
        if self._writer is None:
            return
        records = {**self._own, **averages}
        self._own = {}
        if with_speed:
            now = time.monotonic()
            records[self.steps - 1, "train/samples_per_s"] = self._samples_since / max(now - self._since, 1e-9)
            self._since, self._samples_since = now, 0
            if self._device.type == "cuda":
                records[self.steps - 1, "train/memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        if records:
            self._writer.write(records)

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if (left := self._abandoned) is not None:
            raise StepError(
                f"step {left.number} was left before its last micro-batch, and then {type(optimizer).__name__}.step() was called: "
                "its gradients are not those of the global batch and were dropped; to skip a step, `continue` with the next one"
            )
        if not any(optimizer is known for known in self._optimizers):
            for model in self.models:
                model.check_optimizer(optimizer)
            self._optimizers.append(optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if self._writer is None or self.current is None:
            return
        which = next(at for at, known in enumerate(self._optimizers) if known is optimizer)
        prefix = "train/learning_rate" if which == 0 else f"train/learning_rate/optimizer{which}"
        groups = optimizer.param_groups
        for at, group in enumerate(groups):
            name = prefix if len(groups) == 1 else f"{prefix}/{at}"
            self._own[self.current.number, name] = float(group["lr"])


Say = Callable[[str], None]
