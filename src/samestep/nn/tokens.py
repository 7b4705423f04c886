"""Losses of next tokens, one a place."""

from torch import Tensor
from torch.nn.functional import cross_entropy

from samestep.errors import StepError


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """How surprised a language model was by each token but the first: (rows, length - 1), in fp32.

    `logits` are (rows, length, words) for the `tokens` (rows, length) themselves. A token below 0 stands for none: it
    has a loss that means nothing, to be left out by `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    >>> import torch
    >>> next_token_losses(torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 4])
    """
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise StepError(
            f"next_token_losses got logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}: "
            "give (rows, length, words) and (rows, length), both for the same tokens"
        )
    wanted = tokens[:, 1:].clamp(min=0).flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted, reduction="none").view(len(tokens), -1)
