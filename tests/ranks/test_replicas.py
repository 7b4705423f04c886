"""The replica check: names tensor, ranks and step of a difference, and ignores what may differ."""

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.parallel.replica_check import check_replicas
from tests.ranks.expected import ignore_batchnorm_warning

DATA = list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def train(replica_check_every, change, strategy=None):
    """Six steps; in step 2 rank 1 changes something on its own."""
    with Run(global_batch=8, replica_check_every=replica_check_every, start_timeout=20, step_timeout=20) as run:
        with ignore_batchnorm_warning():
            model = run.wrap(Net(), strategy)
        inner = getattr(model, "module", model)
        optimizer = torch.optim.AdamW(model.parameters())
        for epoch in run.shard(DATA).epochs(2):
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 2 and run.rank == 1:
                    with torch.no_grad():
                        change(inner, optimizer)
        return run._lifecycle.context.progress.steps, inner.norm.running_mean.tolist()


def train_briefly(folder, kind):
    """Six steps, fewer than replica_check_every; each rank decides or computes something by itself."""
    with Run(global_batch=8, start_timeout=20, step_timeout=20, precision="fp64") as run:
        net = Centered() if kind == "buffer" else nn.Linear(4, 1)
        model = run.wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        train = run.shard(DATA)
        checkpoint = run.checkpoint(folder, model=model, train=train) if folder else None
        for epoch in train.epochs(2):
            for step in epoch:
                for x in step:
                    step.mean((model(x).squeeze(1) - 1) ** 2).backward()
                if kind != "step.loss" or step.loss < run.mean(step.loss):
                    optimizer.step()
                optimizer.zero_grad()
                if kind == "plateau":
                    plateau.step(step.loss + 10 * step.number * run.rank)
            if checkpoint is not None:
                checkpoint.save()
            elif kind == "break":
                break
        if kind == "export" and run.is_main:
            net.bfloat16()
        if kind == "break" and run.rank == 1:
            net.bias.data += 1
    return True


class Centered(nn.Module):
    """A running mean of this rank's rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        self.center.lerp_(x.detach().mean(0), 0.5)
        return self.head(x - self.center)


def nothing(inner, optimizer):
    pass


def nudge_weight(inner, optimizer):
    weight = inner.head.weight
    weight[0, 2] = torch.nextafter(weight[0, 2], torch.tensor(1.0))


def nudge_moment(inner, optimizer):
    optimizer.state[inner.body.bias]["exp_avg"][1] += 1e-3


def nudge_buffer(inner, optimizer):
    inner.seen[0] = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [(nudge_weight, "head.weight"), (nudge_moment, "body.bias (exp_avg of AdamW)"), (nudge_buffer, "seen")],
)
def test_the_first_difference_is_named_with_ranks_and_step(ranks, change, name):
    # by step 3 the change would have spread to other tensors, except for a buffer
    for text in ranks.errors(3, train, 1, change):
        assert (
            f"ReplicasDiffer: after step 2, ranks hold different bits in '{name}': ranks [0, 2] differ from ranks [1]."
            in text
        )
        assert (
            "Something changed it on some ranks only: an optimizer step under a rank condition, a decision by one"
            in text
        )
        assert "samestep stops the run, since its ranks no longer train the same model" in text


def test_replicas_are_compared_every_replica_check_every_steps(ranks):
    for text in ranks.errors(2, train, 2, nudge_buffer):
        assert (
            "ReplicasDiffer: after step 3, ranks hold different bits in 'seen': ranks [0] differ from ranks [1]."
            in text
        )


def test_replica_check_every_zero_turns_it_off(ranks):
    assert [steps for steps, _ in ranks(2, train, 0, nudge_buffer)] == [6, 6]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_statistics_and_shards_may_differ_between_ranks(ranks, strategy):
    (steps, first), (_, second) = ranks(2, train, 1, nothing, strategy)
    assert steps == 6
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("step.loss", "weight"), ("plateau", "weight"), ("buffer", "center")])
def test_a_short_run_does_not_save_replicas_that_differ(ranks, tmp_path, kind, name):
    for text in ranks.errors(2, train_briefly, tmp_path, kind):
        assert f"ReplicasDiffer: before the checkpoint of step 3, ranks hold different bits in '{name}'" in text
        assert "a decision by one rank's step.loss (decide by run.mean(step.loss))" in text
        assert "a buffer computed from this rank's rows (average it with run.all_reduce)" in text
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(("kind", "when"), [("buffer", "after the last epoch"), ("break", "at the end of the run")])
def test_a_short_run_does_not_end_with_replicas_that_differ(ranks, kind, when):
    for text in ranks.errors(2, train_briefly, None, kind):
        assert f"ReplicasDiffer: {when}, ranks hold different bits in" in text


def test_rank_0_may_convert_the_model_after_training(ranks):
    assert ranks(2, train_briefly, None, "export") == [True, True]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_parts_batchnorm_and_moving_averages_are_saved_and_end_without_an_alarm(ranks, tmp_path, strategy):
    assert ranks(2, train_with_exceptions, tmp_path, strategy) == [3, 3]
    assert list(tmp_path.glob("step-*"))


def train_with_exceptions(folder, strategy):
    """Three steps of a model with unsynchronized BatchNorm, a frozen part with BatchNorm, and a moving average."""
    with Run(global_batch=8, start_timeout=20, step_timeout=20) as run:
        net = Net()
        net.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        with ignore_batchnorm_warning():
            model = run.wrap(net, strategy)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True) if strategy == "ddp" else None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        train = run.shard(DATA)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, train=train)
        for epoch in train.epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if average is not None:
                    average.update_parameters(model)
                checkpoint.save()
            with run.evaluate(model) as net:
                run.mean(net(x) for x in run.shard(DATA))
        return run._lifecycle.context.progress.steps


def train_hybrid(change):
    """Four steps on two nodes of two ranks; in step 1 rank 3, the copy of rank 1, may change its shard by itself."""
    with Run(global_batch=8, replica_check_every=2, start_timeout=60, step_timeout=60) as run:
        model = run.wrap(nn.Linear(4, 4), "hybrid")
        optimizer = torch.optim.AdamW(model.parameters())
        for epoch in run.shard(DATA).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if change == "weight" and step.number == 1 and run.rank == 3:
                    model.weight.to_local().data[0, 0] += 1e-3
                if change == "moment" and step.number == 1 and run.rank == 3:
                    optimizer.state[model.weight]["exp_avg"].to_local()[0, 0] += 1e-3
        return run._lifecycle.context.progress.steps


def test_copies_of_a_hybrid_model_that_agree_pass(ranks):
    assert ranks(4, train_hybrid, None, nodes=2) == [3] * 4


@pytest.mark.parametrize(("change", "name"), [("weight", "weight"), ("moment", "weight (exp_avg of AdamW)")])
def test_copies_of_a_hybrid_model_that_differ_raise(ranks, change, name):
    for text in ranks.errors(4, train_hybrid, change, nodes=2):
        assert f"after step 1, ranks hold different bits in {name!r}: ranks [1] differ from ranks [3]" in text


def compare_shapes(strategy):
    """Compare a tensor that has the same bits everywhere, but one row more on rank 1."""
    with Run(global_batch=2, start_timeout=60) as run:
        layer = nn.Linear(3, 4, bias=False)
        weight = run.wrap(layer, "fsdp").weight if strategy else torch.zeros(4)
        wrong = torch.zeros(5) if run.rank == 1 else weight
        check_replicas(run._comm, {"weight": weight}, "at the start")
        check_replicas(run._comm, {"weight": wrong}, "now")


@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_tensors_with_other_layouts_differ_even_if_their_bits_do_not(ranks, strategy):
    for text in ranks.errors(2, compare_shapes, strategy):
        assert "now, ranks hold different bits in 'weight': ranks [0] differ from ranks [1]" in text
