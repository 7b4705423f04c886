"""Out of memory in the first steps: all ranks start anew with half the micro-batch, and learn the same."""

import torch

from samestep.facts.world import environment
from samestep.launch.exit_codes import OUT_OF_MEMORY
from samestep.launch.orphan import LAUNCHER

_FIRST_STEPS = 20  # what fits so often fits for good, unless samples differ in size: then a person should look
# How a rank puts it that another one ran out of memory, and how the CPU's allocator puts it.
_TOLD = ("failed: OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory")


class TooLarge(SystemExit):
    """Ends this rank with the code that lets the launcher start all of them anew with half the micro-batch."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank, or another one that it waited for, had not enough memory."""
    notes: list[str] = getattr(error, "__notes__", [])
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in text for word in _TOLD for text in (str(error), *notes)
    )


def half_may_help(stepped: int, rows: int) -> bool:
    """Whether a smaller micro-batch is the answer: in the first steps, with more than one row, under our launcher."""
    return stepped < _FIRST_STEPS and rows > 1 and LAUNCHER in environment()


def advise(stepped: int, rows: int) -> str:
    """What to do about it where starting anew would not help or nobody is there to do it."""
    if rows > 1:
        when = f"in step {stepped + 1} of this process" if stepped < _FIRST_STEPS else f"after {stepped} steps"
        return (
            f"out of memory {when}, with {rows} row(s) in a micro-batch: pass run.shard(..., micro_batch="
            f"{-(-rows // 2)}), which learns the same; `samestep run` halves it by itself in the first steps"
        )
    return (
        "out of memory with one row in a micro-batch: cut the model, run.wrap(model, 'fsdp'), compute activations "
        "twice, run.wrap(model, checkpoint=(Block,)), or ask `samestep plan` what would fit"
    )
