"""Metrics that add up over batches and ranks: accuracy and F1 from class counts, and metrics of saliency."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from samestep.errors import SamestepError


def class_counts(labels: Tensor, predictions: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """True positives, predictions and labels per class: float64 of shape (3, classes).

    Add them up over batches, then over ranks with `run.all_reduce(counts, "sum")`. In training pass
    `weights=step.weights`, which are zero for padding.

    >>> class_counts(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    tensor([[1., 1.],
            [2., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    if labels.dim() != 1 or labels.shape != predictions.shape:
        raise SamestepError(
            f"class_counts got labels of shape {tuple(labels.shape)} and predictions of shape "
            f"{tuple(predictions.shape)}: pass one class per row for both, such as scores.argmax(-1)"
        )
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights
    counted = ((labels, weights * (labels == predictions)), (predictions, weights), (labels, weights))
    return torch.stack([torch.bincount(which, weight.double(), classes) for which, weight in counted])


def class_scores(counts: Tensor) -> dict[str, float]:
    """`accuracy` and `macro_f1` from the sum of `class_counts`; a class that never occurs has an F1 of 0.

    >>> class_scores(class_counts(torch.tensor([0, 1]), torch.tensor([0, 1]), classes=2))
    {'accuracy': 1.0, 'macro_f1': 1.0}
    """
    correct, predicted, actual = counts
    f1 = (2 * correct / (predicted + actual).clamp(min=1)).mean()
    return {"accuracy": float(correct.sum() / actual.sum()), "macro_f1": float(f1)}


def fixation_counts(fixations: Tensor, height: int, width: int) -> Tensor:
    """Fixations per pixel, (rows, height, width), from coordinates (rows, fixations, 2) of row and column.

    Coordinates of -1 are padding and are ignored.

    >>> fixation_counts(torch.tensor([[[0, 1], [0, 1], [-1, -1]]]), height=2, width=2)
    tensor([[[0., 2.],
             [0., 0.]]])
    """
    valid = fixations[..., 0] >= 0
    pixels = torch.where(valid, fixations[..., 0] * width + fixations[..., 1], height * width).long()
    counts = torch.zeros(len(pixels), height * width + 1, device=pixels.device)
    return counts.scatter_add_(1, pixels, torch.ones_like(pixels, dtype=counts.dtype))[:, :-1].view(-1, height, width)


def fixation_density(counts: Tensor, sigma: float) -> Tensor:
    """Blur fixations with a Gaussian of `sigma` pixels, to a density that sums to one per image."""
    if not sigma > 0:
        raise SamestepError(f"fixation_density got sigma={sigma}: pass the width of the Gaussian in pixels, above 0")
    radius = int(3 * sigma) + 1
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, device=counts.device) / sigma) ** 2)[None, None]
    blurred = conv2d(counts[:, None], kernel[..., None], padding=(radius, 0))
    blurred = conv2d(blurred, kernel[..., None, :], padding=(0, radius))
    return blurred[:, 0] / blurred.sum(dim=(1, 2, 3))[:, None, None]


def saliency_metrics(log_density: Tensor, counts: Tensor, sigma: float) -> dict[str, Tensor]:
    """NSS, AUC-Judd, CC and KL per image, (rows,), which `run.means` averages over the images of all ranks.

    `log_density` is the logarithm of the predicted density, which sums to one; `counts` comes from `fixation_counts`.
    CC and KL compare with `fixation_density(counts, sigma)`.
    """
    if log_density.dim() != 3 or log_density.shape != counts.shape:
        raise SamestepError(
            f"saliency_metrics got a density of shape {tuple(log_density.shape)} and fixations of shape "
            f"{tuple(counts.shape)}: both must be (rows, height, width) for the same images"
        )
    density, truth = log_density.exp(), fixation_density(counts, sigma)
    predicted_scores, true_scores = _standardize(density), _standardize(truth)
    return {
        "nss": (predicted_scores * counts).sum((1, 2)) / counts.sum((1, 2)),
        "auc_judd": torch.stack([_auc_judd(image, seen) for image, seen in zip(density, counts > 0, strict=True)]),
        "cc": (predicted_scores * true_scores).mean((1, 2)),
        "kl": (truth * ((truth + 1e-12).log() - log_density)).sum((1, 2)),
    }


def _standardize(maps: Tensor) -> Tensor:
    """Mean 0 and deviation 1 per image; zeros for a constant map."""
    deviation = maps.std((1, 2), correction=0, keepdim=True)
    return torch.where(deviation > 0, (maps - maps.mean((1, 2), True)) / deviation, 0)


def _auc_judd(density: Tensor, fixated: Tensor) -> Tensor:
    """The area under the ROC curve of one image: thresholds at fixated pixels, all other pixels are negatives."""
    thresholds, values = density[fixated].sort(descending=True).values, density.flatten().sort().values
    hits = len(thresholds) - torch.searchsorted(thresholds.flip(0), thresholds)  # equal values count together
    above = values.numel() - torch.searchsorted(values, thresholds)
    false_alarms = (above - hits) / (values.numel() - len(thresholds))
    zero, one = torch.zeros(1, device=density.device), torch.ones(1, device=density.device)
    return torch.trapezoid(torch.cat([zero, hits / len(thresholds), one]), torch.cat([zero, false_alarms, one]))
