"""run.predict: the outputs of all ranks in dataset order, on rank 0, with the same bits on any world size."""

import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run
from samestep.data.audit import audit
from samestep.data.partition import PredictionPartition
from tests.ranks.models import Mlp

N = 23  # with batches of 4: 6 batches, the last with 3 rows


def dataset(n=N):
    inputs = torch.randn(n, 6, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, torch.arange(n))


def predictions(strategy, n=N, micro_batch=4):
    """What rank 0 gets: nested outputs, batch by batch."""
    with Run(global_batch=8, seed=1) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        data = run.shard(dataset(n), micro_batch=micro_batch)
        with run.evaluate(model) as net:
            outputs = ({"scores": net(x), "rows": (x[:, :2], [f"row {i}" for i in index])} for x, index in data)
            items = list(run.predict(outputs))
        again = run.mean(index for _, index in data)  # an evaluation as usual afterwards
        assert again == (n - 1) / 2
        return [(each["scores"].tolist(), each["rows"][0].tolist(), each["rows"][1]) for each in items]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_predictions_have_the_same_bits_and_order_on_one_two_and_three_ranks(ranks, strategy):
    (alone,) = ranks(1, predictions, strategy)
    assert [name for _, _, names in alone for name in names] == [f"row {i}" for i in range(N)]
    assert [len(scores) for scores, _, _ in alone] == [4, 4, 4, 4, 4, 3]
    for size in (2, 3):
        main, *others = ranks(size, predictions, strategy)
        assert main == alone
        assert others == [[]] * (size - 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_without_a_batch_take_part(ranks, strategy):
    (alone,) = ranks(1, predictions, strategy, 3)
    assert ranks(3, predictions, strategy, 3) == [alone, [], []]


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_sample_is_in_one_batch_that_does_not_depend_on_the_world_size(size, lockstep):
    for n in (1, 3, 4, 5, 24, 25):
        parts = [PredictionPartition(n, 4, rank, size, lockstep) for rank in range(size)]
        if lockstep:
            assert len({len(part) for part in parts}) == 1
        batches = {part.number(k): part.batch(k) for part in parts for k in range(len(part))}
        real = [batches[number] for number in sorted(batches) if batches[number].real]
        assert [(batch.start, batch.stop) for batch in real] == [(at, min(at + 4, n)) for at in range(0, n, 4)]
        assert all(part.read_range(k)[1] > part.read_range(k)[0] for part in parts for k in range(len(part)))


def predict_with_ledger(folder):
    with Run(global_batch=8, seed=1, folder=folder, ledger=True) as run:
        data = run.shard(dataset(), micro_batch=4, name="test")
        return sum(len(x) for x in run.predict(x for x, _ in data))


def test_the_ledger_proves_that_every_sample_was_predicted_once(ranks, tmp_path):
    assert ranks(3, predict_with_ledger, tmp_path) == [N, 0, 0]
    (shard,) = audit(tmp_path).shards
    (evaluation,) = shard.evaluations
    assert (evaluation.samples, evaluation.complete, shard.verdict) == (N, True, "sound")


def default_batches(global_batch):
    with Run(global_batch=global_batch) as run:
        data = run.shard(dataset(100))
        return [len(x) for x in run.predict(x for x, _ in data)]


def test_batches_have_64_samples_or_the_global_batch(ranks):
    for size in (1, 2):
        assert ranks(size, default_batches, 256)[0] == [64, 36]
        assert ranks(size, default_batches, 40)[0] == [40, 40, 20]


def draw_in_predictions():
    """Random numbers of an evaluation, keyed by sample."""
    with Run(global_batch=8, seed=1) as run:
        data = run.shard(dataset(), micro_batch=4)
        drawn = run.predict((data.normal(2), torch.rand(len(x), 2)) for x, _ in data)
        return [[part.tolist() for part in item] for item in drawn]


def test_what_is_drawn_does_not_depend_on_the_world_size(ranks):
    (alone,) = ranks(1, draw_in_predictions)
    assert len(alone) == 6
    for size in (2, 3):
        assert ranks(size, draw_in_predictions)[0] == alone


class Output:
    """A prediction that is counted while it is in memory, on the rank that has computed it and on rank 0."""

    def __init__(self):
        ALIVE.add(self)

    def __reduce__(self):
        return Output, ()


ALIVE = weakref.WeakSet()


def most_alive(n):
    ALIVE.clear()
    with Run(global_batch=8, seed=1) as run:
        data, most = run.shard(dataset(n), micro_batch=4), 0

        def outputs():
            nonlocal most
            for _ in data:
                yield Output()
                most = max(most, len(ALIVE))

        count = sum(1 for _ in run.predict(outputs()))
        assert count == (-(-n // 4) if run.is_main else 0)
        return most


def test_the_number_of_batches_in_memory_does_not_grow_with_the_dataset(ranks):
    assert ranks(2, most_alive, 200) == ranks(2, most_alive, 24)


def leave_early(strategy):
    with Run(global_batch=8, seed=1) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        data = run.shard(dataset(), micro_batch=4)
        seen = []
        with run.evaluate(model) as net:
            for item in run.predict((index, net(x)) for x, index in data):
                seen += item[0].tolist()
                if len(seen) == 8:
                    break
        return seen, run.sum(index for _, index in data)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_0_may_leave_the_loop(ranks, strategy):
    total = N * (N - 1) // 2
    for size in (1, 2, 3):
        assert ranks(size, leave_early, strategy) == [(list(range(8)), total), *[([], total)] * (size - 1)]


def fail_on_rank_1(strategy):
    with Run(global_batch=8, seed=1, start_timeout=20, step_timeout=20) as run:
        model = run.wrap(Mlp(), strategy)
        data = run.shard(dataset(), micro_batch=4)

        def outputs(net):
            for x, index in data:
                if 12 in index:  # in the second batch of rank 1
                    raise ValueError("no prediction for sample 12")
                yield net(x)

        with run.evaluate(model) as net:
            for _ in run.predict(outputs(net)):
                pass


def test_an_error_on_one_rank_reaches_all(ranks):
    zero, one = ranks.errors(2, fail_on_rank_1, "ddp")
    assert "ValueError: no prediction for sample 12" in one
    assert "RankMissing: rank 0 waits in run.predict" in zero
    assert "but rank 1 failed: ValueError: no prediction for sample 12" in zero


def fail_in_the_body():
    with Run(global_batch=8, seed=1, start_timeout=20, step_timeout=20) as run:
        data = run.shard(dataset(), micro_batch=4)
        for _ in run.predict(x for x, _ in data):
            raise OSError("the disk is full")
        run.barrier()


def test_an_error_in_the_body_of_the_loop_reaches_all(ranks):
    zero, one = ranks.errors(2, fail_in_the_body)
    assert "OSError: the disk is full" in zero
    assert "rank 0 failed: OSError: the disk is full" in one


def collective_in_the_body():
    with Run(global_batch=8, seed=1, start_timeout=20, step_timeout=20) as run:
        data = run.shard(dataset(), micro_batch=4)
        for x in run.predict(x for x, _ in data):
            run.mean(x)


@pytest.mark.parametrize("size", [1, 2])
def test_a_collective_in_the_body_of_the_loop_raises(ranks, size):
    assert (
        "was called inside run.predict: only one rank runs that loop, so the others never reach this call; call "
        "run.mean outside of run.predict" in ranks.errors(size, collective_in_the_body)[0]
    )


def predict_a_list():
    with Run(global_batch=8) as run:
        run.predict([x for x, _ in run.shard(dataset())])


def predict_without_a_shard():
    with Run(global_batch=8) as run:
        list(run.predict(iter([1, 2])))


def predict_from_a_started_loop():
    with Run(global_batch=8) as run:
        batches = iter(run.shard(dataset(), micro_batch=4))
        next(batches)
        list(run.predict(x for x, _ in batches))


def predict_every_second_batch():
    with Run(global_batch=8) as run:
        data = run.shard(dataset(), micro_batch=4)
        list(run.predict(x for x, index in data if index[0] != 4))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def predict_a_stream():
    with Run(global_batch=8) as run:
        list(run.predict(x for x in run.stream(Numbers())))


def predict_a_lambda():
    with Run(global_batch=8) as run:
        list(run.predict(lambda: 1 for _ in run.shard(dataset())))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (predict_a_list, "DataError: run.predict got a list and needs a generator, which computes one batch at a time"),
        (
            predict_without_a_shard,
            "DataError: run.predict got an item that does not belong to batch 0: pass a generator",
        ),
        (predict_from_a_started_loop, "DataError: run.predict got an item that does not belong to batch"),
        (predict_every_second_batch, "DataError: run.predict got an item that does not belong to batch"),
        (
            predict_a_stream,
            "DataError: run.predict got values of a stream, whose batches depend on the number of ranks",
        ),
        (predict_a_lambda, "CommunicationError: run.predict cannot pickle the item for batch 0, a function: "),
    ],
)
def test_what_cannot_be_predicted_is_named(ranks, function, message):
    assert message in ranks.errors(1, function)[0]
