"""The loss scale of fp16: small gradients kept from vanishing, steps that overflow dropped by all ranks together."""

from collections.abc import Sequence
from typing import Final

from samestep.errors import StepError
from samestep.ranks.link import Link
from samestep.torch_private import multiply_all
from samestep.wrap.wrapped import Wrapped

_FIRST: Final = 65536.0
_GROWTH_STEPS: Final = 2000  # as torch.amp.GradScaler
_LEAST: Final = 2.0**-14  # thirty halvings: no range of numbers is the cause any more


class LossScale:
    """A factor on every loss, the same on all ranks, taken out of the gradients before anybody sees them.

    torch.amp.GradScaler does this by stepping the optimizer in the user's place. Here the optimizer stays the user's: a
    step that overflowed loses its gradients, and an optimizer that finds none changes nothing.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.factor = _FIRST
        self.dropped = False
        self._good_steps = 0

    @property
    def on_rank(self) -> float:
        """The factor on one rank's loss, which already carries the world size as a factor.

        So a sample's gradients are equally large on any number of ranks, and overflow alike.
        """
        return self.factor / self._link.world.size

    def begin(self, models: Sequence[Wrapped]) -> None:
        """Called when a step begins: gradients that an earlier step left to be added to must have the same factor."""
        self.dropped = False
        for model in models:
            multiply_all(list(model.gradients()), self.on_rank)

    def settle(self, models: Sequence[Wrapped], number: int) -> str | None:
        """Take the factor out of the gradients, or drop them all where one overflowed; then say so.

        Averaged gradients hold the same bits on every rank, so each sees for itself what all see; sharded ones do not.
        """
        healthy = all(bool(model.all_finite()) for model in models)
        if any(model.sharded for model in models):
            healthy = all(bool(part[0]) for part in self._link.exchange("the fp16 loss scale", [float(healthy)]))
        if not healthy:
            return self._drop(models, number)
        for model in models:
            multiply_all(list(model.gradients()), 1.0 / self.on_rank)
        self._good_steps += 1
        if self._good_steps == _GROWTH_STEPS:
            self.factor, self._good_steps = 2.0 * self.factor, 0
        return None

    def state_dict(self) -> dict[str, float]:
        """The factor and how long it has held, for a checkpoint."""
        return {"factor": self.factor, "good_steps": float(self._good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.factor, self._good_steps = state["factor"], int(state["good_steps"])

    def _drop(self, models: Sequence[Wrapped], number: int) -> str:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
        before, self.factor = self.factor, self.factor / 2.0
        self.dropped, self._good_steps = True, 0
        if self.factor < _LEAST:
            raise StepError(
                f"the gradients of step {number} are not finite even at a loss scale of {before:g}: not the range "
                "of fp16 fails, but the loss or the model; look at it with precision='fp32' and step.finite()"
            )
        return (
            f"step {number}: a gradient overflowed in fp16 at loss scale {before:g}; all ranks drop this step "
            f"and go on with {self.factor:g}"
        )
