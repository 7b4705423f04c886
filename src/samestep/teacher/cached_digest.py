"""Digests of a batch, row by row: by them a cache knows whether a sample's inputs are the ones it has outputs for."""

from collections.abc import Mapping
from zlib import crc32

import torch

from samestep.data.keyed import sample_key_tensor
from samestep.errors import TeacherError
from samestep.teacher.outputs import take_apart

_STRIDE = 0x3C6EF372FE94F82B  # odd and below 2**63: a word has another value at each place


def row_digests(args: tuple[object, ...], kwargs: Mapping[str, object], rows: int) -> torch.Tensor:
    """128 bits for each row, int64 of shape (rows, 2) on the CPU, equal bit for bit on every device.

    Every tensor whose first dimension is that of the rows counts row by row; whatever else there is (a mask for all, a
    flag) counts for each of them. Two inputs that differ by chance share a digest once in 2**64 pairs at most; it is no
    defence against those who wish for it.
    """
    form, tensors = take_apart((args, dict(kwargs)), "the teacher's input")
    if not any(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise TeacherError(
            f"the teacher got tensors of shapes {shapes} for the {rows} samples of this batch, and a cache keeps "
            "outputs by sample: give one row for each, in their order"
        )
    total = torch.zeros(rows, 2, dtype=torch.int64)
    for at, tensor in enumerate(tensors):
        by_row = tensor.dim() > 0 and tensor.shape[0] == rows
        words = _words(tensor.detach().reshape(rows if by_row else 1, -1))
        salt = crc32(f"{at} {tensor.dtype} {tuple(tensor.shape[by_row:])}".encode())
        total += _sums(words, salt).cpu()
    return total + crc32(str(form).encode())


def _sums(words: torch.Tensor, salt: int) -> torch.Tensor:
    """Two sums over a row of its words, each scrambled together with its place; int64 wraps, as it should."""
    places = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
    scrambled = sample_key_tensor(salt, 0, words + places * _STRIDE)
    return torch.stack([scrambled.sum(dim=1), (scrambled * (2 * places + 1)).sum(dim=1)], dim=1) + salt


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of each row as 64-bit words, the last one filled up with zeros."""
    flat = rows.contiguous().view(torch.uint8) if rows.numel() else rows.new_empty((len(rows), 0), dtype=torch.uint8)
    missing = -flat.shape[1] % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(len(flat), missing)], dim=1)
    return flat.contiguous().view(torch.int64)
