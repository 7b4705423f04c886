"""Edge cases in which a training loop often goes wrong silently: each works, or raises with the reason."""

import os
import warnings

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run, read_metrics
from samestep.context import seed_all_ranks
from samestep.errors import CommunicationError, DataError, StepError, WrapError


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class Uneven(IterableDataset):
    """Two shards, one of which ends long before the other."""

    num_shards = 2

    def shard(self, index):
        return range(20) if index == 0 else range(100, 104)

    def __iter__(self):
        raise AssertionError("it is read by shards")


def numbers(n=10):
    return TensorDataset(torch.arange(float(n)).reshape(-1, 1))


def linear():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def several_runs():
    totals = []
    for _ in range(3):
        with Run(global_batch=4) as run:
            model = run.wrap(torch.nn.Linear(1, 1))
            totals.append((run.sum(run.rank + 1), model is not None))
    return totals


def test_several_runs_in_one_process_work(ranks):
    assert ranks(2, several_runs) == [[(3, True)] * 3] * 2


def start_with_seeds(seeds):
    rank = int(os.environ["RANK"])
    with Run(global_batch=4, seed=seeds[rank]):
        raise AssertionError("the run started")


def test_seeds_are_compared_as_integers(ranks):
    for rank, text in enumerate(ranks.errors(2, start_with_seeds, [1 << 60, (1 << 60) + 1])):  # equal as float64
        assert f"rank {rank} has Run(global_batch=4, seed={(1 << 60) + rank}" in text
        assert "pass the same values on all ranks" in text


def test_calls_on_a_run_that_is_not_open_raise():
    run = Run(global_batch=4)
    with pytest.raises(
        CommunicationError, match=r"run\.barrier at test_edges\.py:\d+ was called on a run that is not started"
    ):
        run.barrier()
    with run:
        pass
    with pytest.raises(
        CommunicationError, match=r"run\.agree at test_edges\.py:\d+ was called on a run that is closed"
    ):
        run.agree(True)


def different_tensors():
    with Run(global_batch=4, start_timeout=120) as run:
        run.all_reduce(torch.ones(3 + run.rank), "sum")


def test_tensors_of_different_sizes_raise_instead_of_hanging(ranks):
    for text in ranks.errors(2, different_tensors):
        assert "CommunicationError: run.all_reduce got op='sum' and" in text
        assert "pass tensors of the same shape and dtype on all ranks" in text


def test_a_weighted_mean_in_half_precision_does_not_overflow():
    with Run(global_batch=4) as run:
        mean = run.all_reduce(torch.tensor([100.0], dtype=torch.float16), "mean", weight=1000.0)
        assert (mean.item(), mean.dtype) == (100.0, torch.float16)


def different_lengths():
    with Run(global_batch=4) as run:
        run.shard(numbers(10 + run.rank))


def test_datasets_of_different_lengths_raise(ranks):
    for text in ranks.errors(2, different_lengths):
        assert "DataError: the dataset does not have the same length on all ranks: 10 on rank 0, 11 on rank 1" in text


def broadcast_expanded():
    with Run(global_batch=4) as run:
        model = torch.nn.Linear(1, 1)
        model.register_buffer("mask", torch.full((1,), float(run.rank)).expand(64))
        model.register_buffer("turned", torch.full((4, 4), float(run.rank)).t())
        run.wrap(model)
        return model.mask.tolist(), model.turned.flatten().tolist()


def test_non_contiguous_buffers_are_broadcast_correctly(ranks):
    assert ranks(2, broadcast_expanded) == [([0.0] * 64, [0.0] * 16)] * 2


def test_wrapping_a_model_twice_raises():
    with Run(global_batch=4) as run:
        model = torch.nn.Linear(1, 1)
        run.wrap(model)
        with pytest.raises(
            WrapError, match=r"run.wrap needs a torch.nn.Module, got function: wrap the model that trains; a teacher is"
        ):
            run.wrap(lambda x: x)
        with pytest.raises(WrapError, match="Linear has parameters that are already wrapped: wrap a model once"):
            run.wrap(model)


def test_breaking_out_of_an_epoch_keeps_the_position_after_the_last_complete_step():
    with Run(global_batch=2, seed=1) as run:
        train = run.shard(numbers())
        seen = []
        for epoch in train.epochs(1):
            for step in epoch:
                seen += [row for (x,) in step for row in x[:, 0].tolist()]
                if step.number == 1:
                    break
            break
        assert (train.state_dict()["epoch"], train.state_dict()["step"]) == (0, 2)
        assert not run._lifecycle.context.progress.in_step
        for epoch in train.epochs(1):
            for step in epoch:
                seen += [row for (x,) in step for row in x[:, 0].tolist()]
        assert seen == [float(i) for i in range(10)]


def test_an_epoch_cannot_be_iterated_twice():
    with Run(global_batch=2) as run:
        train = run.shard(numbers())
        for epoch in train.epochs(1):
            assert sum(1 for step in epoch for _ in step) == 5
            with pytest.raises(DataError, match="epoch 0 was iterated twice"):
                list(epoch)
        with pytest.raises(DataError, match="a second iteration over this shard began before the first one ended"):
            [list(train) for _ in train]
        assert train.steps_per_epoch == 5


def optimizer_step_in_the_loop(micro_batch):
    with Run(global_batch=4) as run:
        model = run.wrap(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard(numbers(), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x)[:, 0]).backward()
                    optimizer.step()
                    optimizer.zero_grad()


def test_an_optimizer_step_before_the_gradients_are_complete_raises(ranks):
    for text in ranks.errors(2, optimizer_step_in_the_loop, 1):
        assert "StepError: SGD.step() was called inside the loop over the micro-batches of step 0" in text
        assert "call it after the loop; for one loop per optimizer, as in a GAN, pass run.shard(..., passes=2)" in text
    ranks(2, optimizer_step_in_the_loop, None)  # one micro-batch per step: the gradients are complete


def backward(step, model, loss):
    for (x,) in step:
        loss(step, model(x)[:, 0]).backward()


def test_a_masked_mean_over_several_micro_batches_needs_cleared_gradients():
    with Run(global_batch=4) as run:
        model = run.wrap(linear())
        train = run.shard(numbers(8), micro_batch=2)
        steps = iter(next(iter(train.epochs(1))))
        with pytest.raises(StepError, match="mixes a masked mean with other means"):
            backward(next(steps), model, lambda step, losses: step.mean(losses, losses > -1) + step.sum(losses))
    with Run(global_batch=4) as run:
        model = run.wrap(linear())
        steps = iter(next(iter(run.shard(numbers(8), micro_batch=2).epochs(1))))
        backward(next(steps), model, lambda step, losses: step.mean(losses, losses > -1))
        with pytest.raises(StepError, match=r"starts with gradients of an earlier step.*call optimizer.zero_grad\(\)"):
            backward(next(steps), model, lambda step, losses: step.mean(losses, losses > -1))


def test_backward_after_the_micro_batch_loop_raises():
    with Run(global_batch=4) as run:
        model, held = run.wrap(linear()), []
        steps = iter(next(iter(run.shard(numbers(8), micro_batch=2).epochs(1))))
        backward(next(steps), model, lambda step, losses: held.append(step.mean(losses)) or step.mean(losses))
        for loss in held:  # of two micro-batches
            with pytest.raises(StepError, match=r"backward\(\) of a loss of step 0 ran after the loop"):
                loss.backward()


def test_each_generator_of_a_sample_draws_different_numbers():
    with Run(global_batch=4) as run:
        for step in next(iter(run.shard(numbers(4)).epochs(1))):
            for _ in step:
                draws = [torch.rand(1, generator=step.rng(row)).item() for row in (0, 0, 1, 2)]
                assert len(set(draws)) == 4


def test_a_logged_tensor_keeps_its_value_at_the_time_of_the_call(tmp_path):
    with Run(global_batch=4, folder=tmp_path) as run:
        total = torch.tensor(5.0)
        run.log({"train/total": total, "train/count": torch.tensor(16777217)}, step=0)
        total.zero_()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["train/total"], record["train/count"]) == (5.0, 16777217)


def test_an_evaluation_of_a_stream_drops_nothing_and_respects_the_micro_batch():
    with Run(global_batch=4) as run:
        batches = [batch.tolist() for batch in run.stream(Count(), drop_last=True, micro_batch=2)]
        assert batches == [[0, 1], [2, 3], [4, 5], [6]]


def read_uneven(state):
    with Run(global_batch=4) as run:
        train = run.stream(Uneven())
        if state is not None:
            train.load_state_dict(state)
        states, seen = [], []
        for epoch in train.epochs(1):
            for step in epoch:
                seen += [int(v) for batch in step for v in batch[step._current.weights > 0]]
                states.append(train.state_dict())
        return states, seen


def test_a_stream_in_shards_resumes_if_one_rank_has_no_records_left(ranks):
    whole = ranks(2, read_uneven, None)
    rest = ranks(2, read_uneven, whole[0][0][3])
    assert [part[1][8 if rank == 0 else 4 :] for rank, part in enumerate(whole)] == [part[1] for part in rest]


@pytest.mark.slow
def test_a_failed_start_raises_on_the_other_ranks(ranks):
    first, second = ranks.errors(2, fail_in_start)
    assert "RankMissing" in first or "CommunicationError" in first
    assert "OSError: no console" in second


def fail_in_start():
    import os

    from samestep.training import lifecycle

    if os.environ["RANK"] == "1":

        def broken(*_):
            raise OSError("no console")

        lifecycle.seed_all_ranks = broken
    try:
        with Run(global_batch=4, start_timeout=120):
            pass
    finally:
        lifecycle.seed_all_ranks = seed_all_ranks


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def train_on(dataset, drop_last):
    with Run(global_batch=8) as run:
        for epoch in run.stream(dataset, drop_last=drop_last).epochs(1):
            for _ in epoch:
                pass


@pytest.mark.parametrize(
    ("dataset", "drop_last", "message"),
    [
        (Nothing(), False, "Nothing has no records, so there is nothing to train on: check the path it reads from"),
        (Count(), True, "Count has fewer records than one global batch, and drop_last=True drops them all"),
    ],
)
def test_a_stream_without_a_step_raises_on_every_rank(ranks, dataset, drop_last, message):
    for text in ranks.errors(2, train_on, dataset, drop_last):
        assert f"DataError: {message}" in text


def test_reading_a_skipped_step_raises():
    with Run(global_batch=4) as run:
        for epoch in run.shard(numbers()).epochs(1):
            steps = list(epoch)
        with pytest.raises(StepError, match=r"step 0 is over.* before the next step starts \(list\(epoch\)"):
            next(iter(steps[0]))


@pytest.mark.parametrize(
    ("losses", "what"),
    [(3.0, "a float"), (torch.ones(4, 0), "shape (4, 0)"), (torch.ones(4).long(), "integers (torch.int64)")],
)
def test_invalid_losses_raise(losses, what):
    with Run(global_batch=4) as run:
        for epoch in run.shard(numbers(4)).epochs(1):
            for step in epoch:
                for _ in step:
                    with pytest.raises(StepError) as caught:
                        step.mean(losses)
    assert f"one loss for each of the 4 rows of this micro-batch, got {what}" in str(caught.value)


def train_with(learn):
    with Run(global_batch=4) as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = run.wrap(linear())
        for epoch in run.shard(numbers(8), micro_batch=1).epochs(1):
            for step in epoch:
                for (x,) in step:
                    learn(step, model(x)[:, 0])
        return [str(warning.message) for warning in given]


def plain_mean(step, losses):
    losses.mean().backward()


def by_sum(step, losses):
    step.sum(losses).backward()


def no_backward(step, losses):
    step.weights.sum()


def test_a_backward_pass_without_step_mean_is_warned_of_once(ranks):
    for first, *others in (ranks(1, train_with, plain_mean), ranks(2, train_with, plain_mean)):
        assert len(first) == 1
        assert first[0].startswith("a backward pass ran without step.mean or step.sum: a plain mean counts")
        assert first[0].endswith("write step.mean(losses).backward() with one loss per sample (reduction='none')")
        assert not any(others)
    for learn in (by_sum, no_backward):
        assert ranks(1, train_with, learn) == [[]]


def train_sparse(masked):
    """An embedding of which each sample uses one row: its weights, and whether each step was finite."""
    with Run(global_batch=4) as run, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step 2 is not finite")
        model = run.wrap(torch.nn.Embedding(12, 2, sparse=True))
        torch.nn.init.ones_(model.module.weight if run.size > 1 else model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        finite = []
        for epoch in run.shard(TensorDataset(torch.arange(10)), micro_batch=2).epochs(1):
            for step in epoch:
                for (index,) in step:
                    losses = model(index) * index[:, None] * (float("nan") if step.number == 2 else 1.0)
                    step.mean(losses, mask=index[:, None].expand(-1, 2) % 2 > 0 if masked else None).backward()
                finite.append(step.finite())
                if finite[-1]:
                    optimizer.step()
                optimizer.zero_grad()
        return next(model.parameters()).detach(), finite


@pytest.mark.parametrize("masked", [False, True])
def test_sparse_gradients_are_checked_and_scaled_like_dense_ones(ranks, masked):
    (alone,) = ranks(1, train_sparse, masked)
    assert alone[1] == [True, True, False]
    for weights, finite in ranks(2, train_sparse, masked):
        assert finite == alone[1]
        assert torch.allclose(weights, alone[0], rtol=0, atol=1e-6)


class Joined(torch.nn.Module):
    """A dense layer whose output is added to rows of a sparse embedding: both get the same gradient tensor."""

    def __init__(self):
        super().__init__()
        self.dense, self.table = torch.nn.Linear(1, 2), torch.nn.Embedding(12, 2, sparse=True)

    def forward(self, index):
        return self.dense(index[:, None].double()) + self.table(index)


def gradient_next_to_a_sparse_one():
    torch.manual_seed(0)
    with Run(global_batch=10) as run:
        net = Joined().double()
        model = run.wrap(net)
        for step in next(iter(run.shard(TensorDataset(torch.arange(10))).epochs(1))):
            for (index,) in step:
                step.mean(model(index).square()).backward()
        return torch.cat([net.dense.weight.grad.T, net.table.weight.grad.to_dense()]).flatten().tolist()


def test_a_dense_layer_next_to_a_sparse_embedding_gets_the_full_gradient(ranks):
    (alone,) = ranks(1, gradient_next_to_a_sparse_one)
    for size in (2, 3):
        for gradient in ranks(size, gradient_next_to_a_sparse_one):
            assert gradient == pytest.approx(alone, rel=1e-12)
