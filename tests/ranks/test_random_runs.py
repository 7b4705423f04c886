"""Random runs: drawn from a seed, trained once on one rank and once on several with restarts."""

import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

from samestep import Run, read_metrics, sample_rng
from samestep.data.audit import audit
from samestep.nn import ConditioningDropout

pytestmark = pytest.mark.slow

SEEDS = range(8)  # try more by hand: each takes a second or two
TOLERANCE = 1e-10
WORDS, WIDTH = 4, 6


ALONE = SimpleNamespace(size=1, strategy=None, micro_batch=None, workers=0, steps=None)


def draw(seed):
    """A run and its layouts: the last trains to the end, those before it are killed after a save."""
    rng = random.Random(seed)
    run = SimpleNamespace(seed=seed, samples=rng.randint(1, 40), global_batch=rng.randint(1, 13))
    run.epochs, run.tests = rng.randint(1, 3), rng.randint(1, 20)
    run.shuffle, run.stream, run.clip, run.tied = (rng.random() < 0.4 for _ in range(4))
    run.drop_last = run.samples >= run.global_batch and rng.random() < 0.3
    run.bad = rng.randrange(run.samples) if rng.random() < 0.3 else None
    run.loss, run.optimizer = rng.choice(list(LOSSES)), rng.choice(list(OPTIMIZERS))
    run.noise = rng.choice(["none", "random", "normal", "rng"])
    run.schedule = rng.choice(["none", "step", "epoch"])
    layouts = [
        SimpleNamespace(
            size=rng.randint(2, 4),
            strategy=rng.choice(["ddp", "fsdp", "zero2"]),
            micro_batch=rng.choice([None, 1, 2, 5]),
            workers=rng.choice([0, 0, 0, 1]),
            steps=rng.randint(1, 4),  # it saves after this many and is killed in the next
        )
        for _ in range(rng.randint(1, 3))
    ]
    layouts[-1].steps = None
    return run, layouts


class Texts(Dataset):
    """Rows of words, some of which count, with random numbers of their sample."""

    def __init__(self, n):
        rng = torch.Generator().manual_seed(n)
        self.words = torch.randn(n, WORDS, WIDTH, generator=rng, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (n, WORDS), generator=rng)
        self.lengths = torch.randint(1, WORDS + 1, (n,), generator=rng)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index] + 0.1 * torch.randn(WORDS, WIDTH, generator=sample_rng(), dtype=torch.float64)
        return words, self.labels[index], torch.arange(WORDS) < self.lengths[index], index


class Numbers(IterableDataset):
    """The indices of the samples, which `decode` turns into samples."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Net(nn.Module):
    """Two blocks and a condition that is dropped for some samples."""

    def __init__(self, tied):
        super().__init__()
        self.stem, self.drop = nn.Linear(WIDTH, 5), ConditioningDropout(0.3, null="learned", shape=(5,))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU()) for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(5, 3)
        if tied:
            self.blocks[1][1].weight = self.blocks[0][1].weight

    def forward(self, words):
        x = self.stem(words)
        x = x + self.drop(x.mean(dim=1))[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale)


LOSSES = {
    "mean": lambda step, losses, mask: step.mean(losses.mean(dim=1)),
    "mean of words": lambda step, losses, mask: step.mean(losses),
    "mean of masked words": lambda step, losses, mask: step.mean(losses, mask),
    "weighted": lambda step, losses, mask: step.mean(losses, mask * torch.arange(1.0, 5.0)),
    "sum": lambda step, losses, mask: 0.05 * step.sum(losses, mask),
    "two": lambda step, losses, mask: step.mean(losses) + 0.01 * step.sum(losses, mask),
}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-4),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, eps=1e-4),
}


def perturbed(drawn, step, words):
    if drawn.noise == "rng":
        rows = [torch.rand(WORDS, WIDTH, generator=step.rng(row), dtype=torch.float64) for row in range(len(words))]
        return words + torch.stack(rows)
    made = {"none": torch.zeros, "random": step.random, "normal": step.normal}[drawn.noise]
    return words + 0.2 * made(WORDS, WIDTH)


def train(drawn, layout, folder):
    """Resume from `folder`: (weights, evaluations by epoch), or None if it was killed before the end."""
    warnings.simplefilter("ignore")  # a bad sample and FSDP views cause warnings
    torch.manual_seed(drawn.seed)
    texts, values, done = Texts(drawn.samples), {}, 0
    with Run(global_batch=drawn.global_batch, seed=drawn.seed, ledger=True, replica_check_every=2) as run:
        net = Net(drawn.tied).double()
        model = run.wrap(net, layout.strategy)
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        optimizer = OPTIMIZERS[drawn.optimizer]([{"params": weights, "weight_decay": 0.01}, {"params": rest}])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        how = {"num_workers": layout.workers, "micro_batch": layout.micro_batch, "drop_last": drawn.drop_last}
        if drawn.stream:
            data = run.stream(Numbers(drawn.samples), decode=texts.__getitem__, **how)
        else:
            data = run.shard(texts, shuffle=drawn.shuffle, name="train", **how)
        test = run.shard(Texts(drawn.tests), name="test", num_workers=0, micro_batch=3)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, schedule=schedule, train=data)
        for epoch in data.epochs(drawn.epochs):
            for step in epoch:
                train_step(drawn, model, step, optimizer)
                if drawn.schedule == "step":
                    schedule.step()
                done += 1
                if done == layout.steps:
                    checkpoint.save()
                elif layout.steps and done > layout.steps:  # one step that was not saved
                    return None
            if drawn.schedule == "epoch":
                schedule.step()
            with run.evaluate(model) as net:
                values[epoch.number] = run.means(evaluate(net, batch) for batch in test)
        checkpoint.save()
        return {name.removeprefix("module."): full(value) for name, value in model.state_dict().items()}, values


def train_step(drawn, model, step, optimizer):
    for words, labels, mask, index in step:
        losses = cross_entropy(model(perturbed(drawn, step, words)).transpose(1, 2), labels, reduction="none")
        if drawn.bad is not None and step.position.epoch == 0:
            losses = torch.where((index == drawn.bad)[:, None], losses * torch.inf, losses)
        LOSSES[drawn.loss](step, losses, mask).backward()
    if drawn.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if step.finite():
        optimizer.step()
    optimizer.zero_grad()


def evaluate(net, batch):
    words, labels, _, _ = batch
    scores = net(words)
    return {
        "loss": cross_entropy(scores.transpose(1, 2), labels, reduction="none"),
        "hits": scores.argmax(-1) == labels,
    }


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def logged(folder):
    return {
        row["step"]: row["train/loss"]
        for row in read_metrics(folder / "metrics.jsonl", by_step=True)
        if "train/loss" in row
    }


def counted(folder):
    """How many trained samples the ledger has, after an audit without faults."""
    report = audit(folder)
    assert report.exactly_once, [fault.text for shard in report.shards for fault in shard.faults]
    return sum(epoch.samples for shard in report.shards if shard.name != "test" for epoch in shard.epochs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_does_not_depend_on_its_layouts(ranks, tmp_path, seed):
    drawn, layouts = draw(seed)
    description, (alone, several) = f"{drawn} on {layouts}", (tmp_path / "alone", tmp_path / "several")
    ((expected, evaluated),) = ranks(1, train, drawn, ALONE, alone)
    for layout in layouts:
        results = ranks(layout.size, train, drawn, layout, several)
    for weights, values in results:
        for name, value in expected.items():
            gap = float((weights[name] - value).abs().max())
            assert gap < TOLERANCE, f"{name} differs by {gap:.1e}: {description}"
        for epoch, numbers in values.items():
            assert numbers == pytest.approx(evaluated[epoch], abs=10 * TOLERANCE), description
    assert logged(several) == pytest.approx(logged(alone), abs=10 * TOLERANCE, nan_ok=True), description
    kept = drawn.samples - drawn.drop_last * (drawn.samples % drawn.global_batch)
    assert counted(alone) == counted(several) == drawn.epochs * kept, description
