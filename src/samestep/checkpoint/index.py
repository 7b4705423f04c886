"""The index of a checkpoint: for every tensor its shape, and which part of it lies in which file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from samestep.checkpoint.dtypes import BY_NAME, NAMES
from samestep.errors import CheckpointError

NAME: Final = "index.json"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor."""

    offset: tuple[int, ...]
    """Where in the tensor it begins."""
    shape: tuple[int, ...]
    """Its shape."""
    file: str
    """The file that holds it."""
    key: str
    """Its name in that file."""


@dataclass(frozen=True)
class Whole:
    """A tensor, all its parts together."""

    dtype: torch.dtype
    """What its elements are."""
    shape: tuple[int, ...]
    """Its shape."""
    pieces: tuple[Piece, ...]
    """Parts that cover it without overlap."""

    @property
    def bytes(self) -> int:
        """How much it holds."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Index = Mapping[str, Whole]


def to_record(index: Index) -> dict[str, object]:
    """The index as JSON has it."""
    return {
        name: {
            "dtype": NAMES[whole.dtype],
            "shape": list(whole.shape),
            "pieces": [[list(p.offset), list(p.shape), p.file, p.key] for p in whole.pieces],
        }
        for name, whole in index.items()
    }


def from_record(record: dict[str, dict[str, list[object]]], files: Iterable[str]) -> Index:
    """Read it back; a piece in a file that the checkpoint does not have is no piece of it."""
    known = set(files)
    index: dict[str, Whole] = {}
    if strange := {str(told["dtype"]) for told in record.values()} - BY_NAME.keys():
        raise CheckpointError(
            f"the index holds tensors of {', '.join(strange)}, which this samestep does not know: update it"
        )
    for name, told in record.items():
        pieces = [Piece(tuple(o), tuple(s), file, key) for o, s, file, key in told["pieces"]]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownArgumentType]  # its checksum was compared
        if elsewhere := {piece.file for piece in pieces} - known:
            raise CheckpointError(f"the index looks for {name} in {elsewhere}, which is no file of the checkpoint")
        index[name] = Whole(BY_NAME[str(told["dtype"])], tuple(told["shape"]), tuple(pieces))  # pyright: ignore[reportArgumentType]  # likewise
    return index


def read_whole(folder: Path, whole: Whole) -> torch.Tensor:
    """One tensor put together from its pieces, without any process group."""
    from safetensors import safe_open

    made = torch.empty(whole.shape, dtype=whole.dtype)
    for piece in whole.pieces:
        with safe_open(folder / piece.file, framework="pt") as file:
            where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            made[where] = file.get_tensor(piece.key)
    return made
