# pyright: basic
# ruff: noqa: N803
"""The Triton kernel of keyed dropout; Triton compiles the source of the function, Python never runs it."""

from functools import cache
from typing import Any

tl: Any = None


@cache
def load_kernel() -> Any:
    """Compile the kernel. Triton is imported here: it exists only on machines with a GPU, and is slow to import."""
    global tl
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language  # pyright: ignore[reportMissingImports]

    tl = triton.language
    return triton.jit(_dropout)


def _dropout(
    inputs: "Any", outputs: "Any", keys: "Any", salt: "Any", threshold: "Any", scale: "Any", words: "Any",
    n1: "Any", n2: "Any", stride0: "Any", stride1: "Any", BLOCK: "tl.constexpr",  # pyright: ignore
) -> None:  # fmt: skip
    """One program computes BLOCK words of one row, by the arithmetic of `sample_rng.keep_mask`."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = (n2 + 3) // 4
    k = index % last
    line = index // last
    start = (tl.load(keys + row) + salt).to(tl.uint64, bitcast=True)
    start = (start ^ (start >> 30)) * 0xBF58476D1CE4E5B9
    start = (start ^ (start >> 27)) * 0x94D049BB133111EB
    start = start ^ (start >> 31)
    counter = (line // n1).to(tl.int64) * stride0 + (line % n1).to(tl.int64) * stride1
    word = start + counter.to(tl.uint64, bitcast=True) + (k + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    lane = tl.arange(0, 4)
    quarter = (word[:, None] >> (16 * lane)[None, :].to(tl.uint64)).to(tl.int32) & 0xFFFF
    column = k[:, None] * 4 + lane[None, :]
    exists = (index < words)[:, None] & (column < n2)
    offset = row * (words // last) * n2 + line[:, None] * n2 + column
    values = tl.load(inputs + offset, mask=exists, other=0.0)
    kept = tl.where((quarter ^ 0x8000) >= threshold, values.to(tl.float32) * scale, 0.0)
    tl.store(outputs + offset, kept.to(values.dtype), mask=exists)
