"""Classifier-free guidance at sampling: away from the unconditional prediction, towards the conditional one."""

from torch import Tensor

from samestep.errors import SamestepError


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """`unconditional + scale * (conditional - unconditional)`: 1 follows the condition, more exaggerates it.

    Papers that write (1 + w) * conditional - w * unconditional mean scale = 1 + w.

    >>> import torch
    >>> guided(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), scale=3.0)
    tensor([ 4., 10.])
    """
    if conditional.shape != unconditional.shape:
        raise SamestepError(
            f"guided got a conditional prediction of shape {tuple(conditional.shape)} and an unconditional one of "
            f"shape {tuple(unconditional.shape)}: give two predictions for the same samples"
        )
    return unconditional + scale * (conditional - unconditional)
