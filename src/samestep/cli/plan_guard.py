"""A script that a plan imports is looked at, not trained: what would train is refused."""

from collections.abc import Generator
from contextlib import contextmanager

from samestep.facts.world import only_looked_at, refuse_if_looked_at


@contextmanager
def looking() -> Generator[None]:
    """Inside, a Run that is created, an optimizer that steps and a process group that is opened are errors.

    A group is noticed when the script has been read, since torch tells nobody before.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(*_: object) -> None:
        """Every optimizer asks here before it steps."""
        refuse_if_looked_at("an optimizer was stepped")

    stepping = register_optimizer_step_pre_hook(refuse)
    try:
        with only_looked_at():
            yield
            if dist.is_available() and dist.is_initialized():
                refuse_if_looked_at("a process group was opened")
    finally:
        stepping.remove()
