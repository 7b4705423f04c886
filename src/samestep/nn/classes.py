"""Accuracy and macro F1 from counts of each class, which add up over batches and ranks; a mean of F1s is none."""

import torch
from torch import Tensor

from samestep.errors import SamestepError


def class_counts(labels: Tensor, guesses: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """How often each class was guessed rightly, was guessed, and was there: float64 of shape (3, classes).

    Add these up over the batches, then over the ranks with `run.all_reduce(counts, "sum")`. In training give
    `weights=step.weights`, which are zero for padding.

    >>> class_counts(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    tensor([[1., 1.],
            [2., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    if labels.dim() != 1 or labels.shape != guesses.shape:
        raise SamestepError(
            f"class_counts got labels of shape {tuple(labels.shape)} and guesses of shape {tuple(guesses.shape)}: give "
            "one class a row for both, such as scores.argmax(-1)"
        )
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights
    counted = ((labels, weights * (labels == guesses)), (guesses, weights), (labels, weights))
    return torch.stack([torch.bincount(which, weight.double(), classes) for which, weight in counted])


def class_scores(counts: Tensor) -> dict[str, float]:
    """`accuracy` and `macro_f1` of what `class_counts` has counted; a class that never came up counts as F1 of 0.

    >>> class_scores(class_counts(torch.tensor([0, 1]), torch.tensor([0, 1]), classes=2))
    {'accuracy': 1.0, 'macro_f1': 1.0}
    """
    right, guessed, there = counts
    f1 = (2 * right / (guessed + there).clamp(min=1)).mean()
    return {"accuracy": float(right.sum() / there.sum()), "macro_f1": float(f1)}
