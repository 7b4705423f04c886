"""How many backward passes followed a forward pass of DDP, which sends the gradients of the first alone."""

import torch
from torch.nn.parallel import DistributedDataParallel


class Passes:
    """Whether a DDP model had two backward passes after one forward pass: it sends the gradients of the first alone."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._again = False
        # What received gradients since the last forward pass. Held no longer than a step: the hooks that fill it live
        # as long as the parameters themselves.
        self._seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._begin_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # called for every parameter at every step: this one runs no line of Python
                parameter.register_post_accumulate_grad_hook(self._seen.append)

    def begin(self) -> None:
        """Forget the micro-batches before, whose gradients are not sent."""
        self._seen.clear()
        self._again = False

    def end(self) -> bool:
        """Whether it was so in the micro-batch that is over."""
        self._look()
        return self._again

    def _begin_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # else DDP takes no note of it either
            self._look()

    def _look(self) -> None:
        self._again = self._again or len(self._seen) > len(set(map(id, self._seen)))
        self._seen.clear()
