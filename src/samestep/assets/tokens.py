"""Texts as the tokens of a model's own tokenizer, in rows of one length."""

from collections.abc import Sequence
from pathlib import Path

import torch


def tokenized(
    lines: Sequence[str], folder: str | Path, length: int, *, begin: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each text (n, length) and which of them are there (n, length), by the tokenizer of a model's folder.

    What is longer is cut. With `begin` every row begins with the token that begins a text, also where the tokenizer
    does not put it there: a causal model can then be asked for the first word as well.
    """
    from transformers import AutoTokenizer  # an extra of its own

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = tokenizer(list(lines), truncation=True, max_length=length).input_ids  # its own ending stays at the cut
    if begin:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        rows = [row if row[:1] == [first] else [first, *row] for row in rows]
    filling = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = torch.full((len(rows), length), 0 if filling is None else filling)
    there = torch.zeros(len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        kept = torch.tensor(row[:length], dtype=torch.long)
        tokens[at, : len(kept)], there[at, : len(kept)] = kept, 1
    return tokens, there
