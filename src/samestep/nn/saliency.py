"""How well a density says where people look: NSS, AUC-Judd, CC and KL, one value an image."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from samestep.errors import SamestepError


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
