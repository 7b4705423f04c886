"""Files of named tensors in the format of safetensors, written block by block."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from samestep.checkpoint.dtypes import NAMES

_ALIGNMENT: Final = 8  # as the format asks for


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    """Its name in the file."""
    dtype: torch.dtype
    """What its elements are."""
    shape: tuple[int, ...]
    """Its shape."""
    get: Callable[[], torch.Tensor]
    """Gives its values, in host memory; asked for when they are written."""


def tensor_blocks(entries: Iterable[Entry]) -> Iterable[bytes | memoryview]:
    """A file in the format of safetensors, block by block: no more than one tensor need be in memory.

    The library's own writer neither flushes, nor tells why it failed, nor hashes on the way; its reader reads these.
    """
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for entry in entries:
        size = entry.dtype.itemsize * torch.Size(entry.shape).numel()
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        values = entry.get().contiguous().reshape(-1)
        if values.numel():
            yield memoryview(values.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]  # a buffer, from Python 3.12 on also by name
