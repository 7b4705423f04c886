"""Distillation losses through step.mean: one and two ranks train the same student and projection."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.nn import Projection, distill_loss, match_features, top_k

RNG = torch.Generator().manual_seed(1)
N = 19
INPUTS, LENGTHS = torch.randn(N, 5, 6, generator=RNG), torch.randint(1, 6, (N, 1), generator=RNG)
LOGITS, FEATURES = torch.randn(N, 5, 11, generator=RNG), torch.randn(N, 5, 9, generator=RNG)


class Student(nn.Module):
    """Returns logits and the features before the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 11)

    def forward(self, x):
        features = self.body(x).tanh()
        return self.head(features), features


def distill(k, by, micro_batch):
    """The weights of student and projection after two epochs, wrapped separately."""
    with Run(global_batch=7, seed=0) as run:
        model, projection = run.wrap(Student()), run.wrap(Projection(4, 9))
        optimizer = torch.optim.AdamW([*model.parameters(), *projection.parameters()], lr=0.01)
        data = run.shard(TensorDataset(INPUTS, LENGTHS, LOGITS, FEATURES), shuffle=True, micro_batch=micro_batch)
        for epoch in data.epochs(2):
            for step in epoch:
                for x, length, logits, features in step:
                    mask = torch.arange(5) < length
                    scores, ours = model(x)
                    target = logits if k is None else top_k(logits, k, temperature=2.0)
                    losses = distill_loss(scores, target, temperature=2.0, mask=mask)
                    losses = losses + match_features(ours, features, projection, by, mask)
                    step.mean(losses, mask).backward()
                optimizer.step()
                optimizer.zero_grad()
        parts = (getattr(part, "module", part) for part in (model, projection))
        return [value.detach().clone() for part in parts for value in part.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("k", "by", "micro_batch"), [(None, "mse", None), (3, "cosine", None), (3, "mse", 2)])
def test_two_ranks_train_the_same_as_one(ranks, k, by, micro_batch):
    (wanted,) = ranks(1, distill, k, by, None)
    for trained in ranks(2, distill, k, by, micro_batch):
        for ours, theirs in zip(trained, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
