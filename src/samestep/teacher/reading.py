"""Pieces of a teacher read from files, without mapping them, into memory that is given."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from samestep.errors import TeacherError
from samestep.teacher.feed import Piece, Read
from samestep.teacher.frozen import Frozen
from samestep.teacher.weights import Span


def open_reader(frozen: Frozen) -> Read:
    """A function that reads one piece into host memory, turned into the piece's dtype.

    Files of safetensors are read, so that no more of them is in this process's memory than what was asked for. A torch
    file does not tell where a tensor lies and is mapped: its pages count for this process until the system wants them.
    """
    scratch: dict[int, torch.Tensor] = {}  # one, as large as the largest tensor that is turned into another dtype

    def read(piece: Piece, into: torch.Tensor) -> None:
        """Read one piece, by way of another place where it must change."""
        span, has = frozen.weights.span(piece.name), frozen.weights.dtype(piece.name)
        if span is None:
            copy_mapped(frozen.weights.tensor, piece, into)
        elif has == piece.dtype:
            _read_into(span, into)
        else:
            if scratch.get(0) is None or scratch[0].numel() < span.length:
                scratch[0] = torch.empty(span.length, dtype=torch.uint8)
            raw = scratch[0][: span.length]
            _read_into(span, raw)
            into.view(piece.dtype).copy_(raw.view(has))

    return read


def copy_mapped(get: Callable[[str], torch.Tensor], piece: Piece, into: torch.Tensor) -> None:
    """Copy a piece from a tensor in host memory."""
    into.view(piece.dtype).view(piece.shape).copy_(get(piece.name))


def _read_into(span: Span, into: torch.Tensor) -> None:
    target = memoryview(into.numpy())  # pyright: ignore[reportArgumentType]  # a buffer, from Python 3.12 on also by name
    with Path(span.path).open("rb", buffering=0) as file:
        got = 0
        while got < span.length:
            count = os.preadv(file.fileno(), [target[got:]], span.start + got)
            if not count:
                raise TeacherError(
                    f"{span.path} ended {span.length - got} bytes too early: it has changed since the teacher was "
                    "made; keep its files as they are while the run lasts"
                )
            got += count
