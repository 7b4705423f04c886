"""What torch's CUDA allocator makes of a wish for memory, and what CUDA's libraries keep of it."""

_SMALLEST = 512
_LARGE = 10 * 2**20
_SEGMENT = 2 * 2**20
_REST = 2**20

CUDA_LIBRARIES = 64 * 2**20
"""Bytes that cuBLAS keeps from its first product on: 32 MiB on Hopper for each thread that computes, and the backward
pass has a thread of its own. Older GPUs take 8 MiB each."""


def allocated(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes.

    Sizes are rounded up to 512 bytes. Above 10 MiB memory comes in multiples of 2 MiB, and a rest below 1 MiB is not
    cut off.

    >>> allocated(0), allocated(1), allocated(513), allocated(int(11.5 * 2**20)) / 2**20
    (0, 512, 1024, 12.0)
    """
    rounded = -(-size // _SMALLEST) * _SMALLEST
    if rounded < _LARGE:
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    return segment if segment - rounded <= _REST else rounded


def exact(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes where nothing is rounded.

    >>> exact(513)
    513
    """
    return size
