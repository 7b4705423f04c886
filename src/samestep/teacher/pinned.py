"""Host memory that a GPU reads by itself."""

from contextlib import suppress

import torch

_PORTABLE = 1  # for every GPU that this process uses


def pin(memory: torch.Tensor) -> bool:
    """Let GPUs read host memory without help of the CPU; False where the driver refuses, and copies need a detour.

    Works for memory that is shared and writable; the pages of one copy can be pinned by every rank of a node.
    """
    runtime = torch.cuda.cudart()
    if runtime is not None and int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA tells of the refusal once more, to whoever starts the next kernel: this one
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: torch.Tensor) -> None:
    """End what `pin` began; call it before the memory goes."""
    if (runtime := torch.cuda.cudart()) is not None:
        runtime.cudaHostUnregister(memory.data_ptr())
