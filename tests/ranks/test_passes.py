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


@pytest.mark.slow
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


def train_on_two_shards(strategy, micro_batch):
    """Translate samples of one shard into those of another: the weights of both models after two epochs."""
    with Run(global_batch=7, seed=1) as run:
        drop = nn.Dropout(0.3)
        generator = run.wrap(nn.Sequential(network(2, 2), drop), strategy)
        discriminator = run.wrap(nn.Sequential(network(2, 4), drop, nn.Linear(4, 1)).double(), strategy)
        d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
        sources = run.shard(data(), shuffle=True, micro_batch=micro_batch, passes=2)
        targets = run.shard(data()[:15] - 3, shuffle=True, micro_batch=micro_batch)
        for source_epoch, target_epoch in zip(sources.epochs(2), targets.epochs(2), strict=True):
            for source_step, target_step in zip(source_epoch, target_epoch, strict=True):
                for target in target_step:
                    target_step.mean(softplus(-discriminator(target + 0.1 * torch.randn_like(target)))).backward()
                for source in source_step:
                    with torch.no_grad():
                        fake = generator(source + 0.1 * source_step.normal(2))
                    source_step.mean(softplus(discriminator(fake))).backward()
                d_optimizer.step()
                d_optimizer.zero_grad()
                for source in source_step:
                    source_step.mean(softplus(-discriminator(generator(source)))).backward()
                g_optimizer.step()
                g_optimizer.zero_grad()
                d_optimizer.zero_grad()
        parameters = [*generator.parameters(), *discriminator.parameters()]
        return torch.cat([getattr(p, "full_tensor", p.detach)().detach().flatten() for p in parameters]).tolist()


@pytest.fixture(scope="module")
def translated(ranks, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("one"))
        return ranks(1, train_on_two_shards, None, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy", "micro_batch"), LAYOUTS)
def test_two_shards_and_two_optimizers_train_as_on_one_rank(ranks, translated, size, strategy, micro_batch):
    for weights in ranks(size, train_on_two_shards, strategy, micro_batch):
        assert weights == pytest.approx(translated, rel=1e-12, abs=1e-14)


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
