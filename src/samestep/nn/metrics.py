"""How well a density says where people look: NSS, AUC-Judd, CC and KL, one value an image."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

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


def fixation_counts(fixations: Tensor, height: int, width: int) -> Tensor:
    """How often each pixel was looked at, (rows, height, width), from places (rows, most, 2) of row and column.

    A row of -1 fills up where an image has fewer fixations than others, and is left out.

    >>> fixation_counts(torch.tensor([[[0, 1], [0, 1], [-1, -1]]]), height=2, width=2)
    tensor([[[0., 2.],
             [0., 0.]]])
    """
    there = fixations[..., 0] >= 0
    places = torch.where(there, fixations[..., 0] * width + fixations[..., 1], height * width).long()
    counts = torch.zeros(len(places), height * width + 1, device=places.device)
    return counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))[:, :-1].view(-1, height, width)


def fixation_density(counts: Tensor, sigma: float) -> Tensor:
    """Fixations as a density that sums to one over an image: a Gaussian of `sigma` pixels at each of them."""
    if not sigma > 0:
        raise SamestepError(f"fixation_density got sigma={sigma}: give the width of the Gaussian in pixels, above 0")
    reach = int(3 * sigma) + 1
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=counts.device) / sigma) ** 2)[None, None]
    soft = conv2d(conv2d(counts[:, None], bell[..., None], padding=(reach, 0)), bell[..., None, :], padding=(0, reach))
    return soft[:, 0] / soft.sum(dim=(1, 2, 3))[:, None, None]


def saliency_measures(log_density: Tensor, counts: Tensor, sigma: float) -> dict[str, Tensor]:
    """NSS, AUC-Judd, CC and KL of each image, (rows,): what `run.means` averages over images on any number of ranks.

    `log_density` is what a model expects, the logarithm of a density that sums to one; `counts` comes from
    `fixation_counts`. CC and KL compare with the fixations as a density of `sigma` pixels.
    """
    if log_density.dim() != 3 or log_density.shape != counts.shape:
        raise SamestepError(
            f"saliency_measures got a density of shape {tuple(log_density.shape)} and fixations of shape "
            f"{tuple(counts.shape)}: both must be (rows, height, width) for the same images"
        )
    density, truth = log_density.exp(), fixation_density(counts, sigma)
    standard, other = (_standard(each) for each in (density, truth))
    return {
        "nss": (standard * counts).sum((1, 2)) / counts.sum((1, 2)),
        "auc_judd": torch.stack([_area(one, seen) for one, seen in zip(density, counts > 0, strict=True)]),
        "cc": (standard * other).mean((1, 2)),
        "kl": (truth * ((truth + 1e-12).log() - log_density)).sum((1, 2)),
    }


def _standard(maps: Tensor) -> Tensor:
    """In units of the deviation over an image; zeros for a map that is the same everywhere and says nothing."""
    deviation = maps.std((1, 2), correction=0, keepdim=True)
    return torch.where(deviation > 0, (maps - maps.mean((1, 2), True)) / deviation, 0)


def _area(values: Tensor, seen: Tensor) -> Tensor:
    """AUC-Judd of one image: thresholds at the pixels looked at, all other pixels as negatives."""
    levels, everything = values[seen].sort(descending=True).values, values.flatten().sort().values
    hits = len(levels) - torch.searchsorted(levels.flip(0), levels)  # equal levels are hit together
    above = everything.numel() - torch.searchsorted(everything, levels)
    false = (above - hits) / (everything.numel() - len(levels))
    zero, one = torch.zeros(1, device=values.device), torch.ones(1, device=values.device)
    return torch.trapezoid(torch.cat([zero, hits / len(levels), one]), torch.cat([zero, false, one]))
