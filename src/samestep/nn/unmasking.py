"""Sampling from discrete diffusion with an absorbing state: all is hidden at first, each pass shows some more."""

from collections.abc import Callable

import torch
from torch import Tensor

from samestep.errors import SamestepError


def unmasking_luck(places: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All luck that one sample takes: the pass-by-pass order of its places, and Gumbel noise for each of its levels.

    Draw it with `sample_rng()` in a dataset's `__getitem__`, and each rank makes its part of the same samples.

    >>> order, noise = unmasking_luck(4, 2, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()), noise.shape
    ([0, 1, 2, 3], torch.Size([4, 2]))
    """
    order = torch.rand(places, generator=generator).argsort()
    noise = torch.rand(places, levels, generator=generator).clamp(1e-9)
    return order, -noise.log().neg().log()


def unmask(predict: Callable[[Tensor], Tensor], order: Tensor, noise: Tensor, passes: int) -> Tensor:
    """Samples (rows, places): `predict` gets what is seen so far, and gives scores (rows, places, levels).

    A place that is hidden holds the number of levels, one above the last. `order` and `noise` are `unmasking_luck` of
    each row; in every pass the next part of the places is drawn by Gumbel's trick, and stays.
    """
    if passes < 1:
        raise SamestepError(f"unmask got passes={passes}: give a whole number from 1 up; as many as places is one each")
    places, hidden = order.shape[1], noise.shape[2]
    seen = torch.full_like(order, hidden)
    for count in range(passes):
        now = (order >= count * places // passes) & (order < (count + 1) * places // passes)
        seen = torch.where(now, (predict(seen) + noise).argmax(dim=-1), seen)
    return seen
