"""Which Python, torch, CUDA and NCCL a run would use."""

import platform
from dataclasses import dataclass

OLDEST_TORCH = (2, 11)
"""The oldest torch that samestep supports."""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch says of itself."""

    python: str
    """Python's version."""
    system: str
    """The operating system and its kernel."""
    torch: str | None
    """Torch's version, or None where it cannot be imported."""
    torch_error: str | None = None
    """Why it cannot be imported."""
    cuda: str | None = None
    """The CUDA (or ROCm) version that torch was built for, or None for a build without."""
    cuda_error: str | None = None
    """Why torch cannot use CUDA although it was built for it."""
    nccl: str | None = None
    """The NCCL version inside torch, or None for a build without."""
    gloo: bool = False
    """Whether torch has gloo."""
    mps: bool = False
    """Whether Apple's GPU can be used."""


def software_without_torch(error: str) -> Software:
    """What is left to tell where torch cannot be imported."""
    return Software(platform.python_version(), platform.platform(), None, error)
