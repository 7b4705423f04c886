"""Several loops over the micro-batches of a step: a GAN trains as on one rank, with any micro-batch size."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from samestep import Run, read_metrics
from samestep.errors import DataError, StepError

N = 17


def data():
    return 1 + torch.randn(N, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Records:
    """A stream of the same samples."""

    def __iter__(self):
        return iter(data())


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.GELU(), nn.Linear(8, outputs)).double()


def train(folder, strategy, micro_batch, source="shard"):
    """The weights of both models after two epochs, and the losses."""
    with Run(global_batch=7, seed=1, folder=folder) as run:
        generator, discriminator = run.wrap(network(3, 2), strategy), run.wrap(network(2, 1), strategy)
        d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
        if source == "shard":
            train_data = run.shard(data(), micro_batch=micro_batch, passes=2)
        else:
            train_data = run.stream(Records(), micro_batch=micro_batch, passes=2)
        for epoch in train_data.epochs(2):
            for step in epoch:
                for real in step:
                    with torch.no_grad():
                        fake = generator(step.normal(3).double())
                    step.mean(softplus(-discriminator(real)) + softplus(discriminator(fake))).backward()
                d_optimizer.step()
                d_optimizer.zero_grad()
                for _ in step:
                    step.mean(softplus(-discriminator(generator(step.normal(3).double())))).backward()
                g_optimizer.step()
                g_optimizer.zero_grad()
                d_optimizer.zero_grad()
        parameters = [*generator.parameters(), *discriminator.parameters()]
        weights = torch.cat([getattr(p, "full_tensor", p.detach)().detach().flatten() for p in parameters]).tolist()
        main = run.is_main
    rows = list(read_metrics(folder / "metrics.jsonl", by_step=True)) if main else []
    return weights, [(row["train/loss"], row["train/loss/optimizer1"]) for row in rows]


LAYOUTS = [(1, None, 2), (2, "ddp", None), (2, "ddp", 2), (3, "ddp", 1), (2, "fsdp", 2)]


@pytest.mark.parametrize(
    ("size", "strategy", "micro_batch", "source"),
    [*((*layout, "shard") for layout in LAYOUTS), (1, None, 2, "stream"), (2, "ddp", 2, "stream")],
)
def test_a_gan_trains_as_on_one_rank(ranks, tmp_path, size, strategy, micro_batch, source):
    ((weights, losses),) = ranks(1, train, tmp_path / "one", None, None, source)
    trained = ranks(size, train, tmp_path / "several", strategy, micro_batch, source)
    for theirs, _ in trained:
        assert theirs == pytest.approx(weights, rel=1e-12)
    assert len(losses) == 6
    for mine, expected in zip(trained[0][1], losses, strict=True):
        assert mine == pytest.approx(expected, rel=1e-12)


def test_samples_count_once_draw_new_numbers_and_a_third_loop_raises(tmp_path):
    with Run(global_batch=7, folder=tmp_path) as run:
        for epoch in run.shard(data(), passes=2, micro_batch=2).epochs(1):
            for step in epoch:
                (first, noise), (second, more) = (
                    zip(*[(x.tolist(), step.normal(1).tolist()) for x in step], strict=True) for _ in range(2)
                )
                assert first == second
                assert all(one != other for one, other in zip(noise, more, strict=True))
                with pytest.raises(StepError, match=r"can be read 2 times, one loop after the other; .* passes=3\)"):
                    list(step)
        assert (run._lifecycle.context.progress.samples, run._lifecycle.context.progress.steps) == (N, 3)


def test_an_invalid_number_of_passes_raises(tmp_path):
    with Run(global_batch=7, folder=tmp_path) as run:
        for passes in (0, 1.5, "2"):
            with pytest.raises(DataError, match=r"passes=.* is not a number of loops: pass how often you loop over"):
                run.shard(data(), passes=passes)
