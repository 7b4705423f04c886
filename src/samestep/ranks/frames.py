"""Frames: small messages of one fixed size, which say who sent them from where."""

import numpy as np
import torch

WORDS = 256  # of 8 bytes: every small exchange has this size, so that unlike ones meet and are told apart
_LABEL = 8  # leading words: 64 bytes that say who called from where
ROOM = WORDS - _LABEL - 1
"""How many values fit."""


def pack(label: str, values: torch.Tensor) -> torch.Tensor:
    """A frame of float64 values; where they do not fit it holds their number only."""
    frame = torch.zeros(WORDS, dtype=torch.int64)  # whole numbers keep every bit of text and of float64 alike
    text = shorten(label).encode().ljust(8 * _LABEL, b"\0")
    frame[:_LABEL] = torch.from_numpy(np.frombuffer(text, dtype=np.int64).copy())
    frame[_LABEL] = values.numel()
    if values.numel() <= ROOM:
        frame[_LABEL + 1 : _LABEL + 1 + values.numel()] = values.view(torch.int64)
    return frame


def label_of(frame: torch.Tensor) -> str:
    """Who sent it, from where."""
    return frame[:_LABEL].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def length_of(frame: torch.Tensor) -> int:
    """How many values its sender has."""
    return int(frame[_LABEL])


def values_of(frame: torch.Tensor) -> torch.Tensor:
    """The values, where they fit."""
    return frame[_LABEL + 1 : _LABEL + 1 + length_of(frame)].view(torch.float64)


def shorten(label: str) -> str:
    """At most 64 bytes; the end says more (the line), so the middle gives way."""
    if len(label.encode()) <= 8 * _LABEL:
        return label
    return f"{label[:24]}~{label[-36:]}".encode()[: 8 * _LABEL].decode(errors="ignore")
