"""Streams on real ranks: the same global batches on any layout, the same end on all ranks, exact resume."""

import multiprocessing

import pytest
import torch
from torch.utils.data import IterableDataset

from samestep import Run, sample_rng
from samestep.errors import DataError, StateError


class Count(IterableDataset):
    """0, 1, 2, ... n-1."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Parts(Count):
    """The same in three shards: shard k holds the numbers with remainder k modulo 3."""

    num_shards = 3

    def shard(self, index):
        return range(index, self.n, 3)


def with_random(record):
    return torch.tensor([float(record), float(torch.rand(1, generator=sample_rng()))], dtype=torch.float64)


def train(dataset, global_batch, micro_batch=None, workers=0, state=None, stop_after=None, epochs=2):
    with Run(global_batch=global_batch, seed=3) as run:
        train = run.stream(dataset, decode=with_random, micro_batch=micro_batch, num_workers=workers)
        if state is not None:
            train.load_state_dict(state)
        seen = {}
        for epoch in train.epochs(epochs):
            for step in epoch:
                rows = seen.setdefault((epoch.number, step.position.index, step.number, step.samples), [])
                for batch in step:
                    noise = step.random(1)
                    weights = step._current.weights
                    rows += [(*r.tolist(), *d.tolist()) for r, d, w in zip(batch, noise, weights, strict=True) if w]
                if step.number == stop_after:
                    return seen, train.state_dict()
        return seen, train.state_dict()


def by_step(parts):
    return {place: sorted(row for seen, _ in parts for row in seen[place]) for place in parts[0][0]}


@pytest.mark.parametrize(
    ("size", "micro_batch", "workers", "n"),
    [(2, None, 0, 22), (2, 2, 2, 22), (3, 2, 0, 22), (4, 1, 0, 22), (4, 1, 0, 1)],
)
def test_a_stream_gives_the_same_global_batches_on_any_layout(ranks, size, micro_batch, workers, n):
    alone = by_step(ranks(1, train, Count(n), 5))
    assert by_step(ranks(size, train, Count(n), 5, micro_batch, workers)) == alone
    for epoch in range(2):
        numbers = [int(row[0]) for place, rows in alone.items() if place[0] == epoch for row in rows]
        assert sorted(numbers) == list(range(n))


def train_with_spawned_worker(dataset, global_batch):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        return train(dataset, global_batch, workers=1, epochs=1)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_spawned_worker_reads_the_same(ranks):
    alone = by_step(ranks(1, train, Count(22), 5, None, 0, None, None, 1))
    assert by_step(ranks(1, train_with_spawned_worker, Count(22), 5)) == alone


@pytest.mark.slow
def test_a_stream_in_shards_ends_at_the_same_step_on_all_ranks(ranks):
    alone = by_step(ranks(1, train, Parts(23), 6))
    assert by_step(ranks(2, train, Parts(23), 6)) == alone
    assert by_step(ranks(3, train, Parts(23), 6, 1)) == alone
    # ranks without a sample pad with one of another rank
    assert by_step(ranks(3, train, Parts(2), 6)) == by_step(ranks(1, train, Parts(2), 6))
    assert by_step(ranks(4, train, Parts(23), 2, None, 2)) == by_step(ranks(1, train, Parts(23), 2))
    first = [int(row[0]) for place, rows in alone.items() if place[0] == 0 for row in rows]
    assert sorted(first) == list(range(23))


def test_a_stream_resumes_on_another_world_size(ranks):
    whole = by_step(ranks(1, train, Count(22), 5))
    parts = ranks(2, train, Count(22), 5, None, 0, None, 6)
    rest = by_step(ranks(3, train, Count(22), 5, None, 0, parts[0][1]))
    assert by_step(parts) | rest == whole
    assert not set(by_step(parts)) & set(rest)


class Restarting(Count):
    """A stream whose state at its end is that of its beginning."""

    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0


@pytest.mark.slow
def test_a_stream_that_was_read_to_its_end_does_not_restart(ranks):
    whole = by_step(ranks(1, train, Restarting(12), 5))
    assert len(whole) == 6
    for stop_after in (1, 2):  # in the middle of the first epoch, and after its last sample
        parts = ranks(2, train, Restarting(12), 5, None, 0, None, stop_after)
        assert by_step(parts) | by_step(ranks(1, train, Restarting(12), 5, None, 0, parts[0][1])) == whole


def evaluate(dataset):
    with Run(global_batch=4) as run:
        test = run.stream(dataset)
        return run.mean(batch.double() for batch in test), run.sum(len(batch) for batch in test)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Count, Parts])
def test_an_evaluation_of_a_stream_is_exact(ranks, kind):
    for size in (1, 3):
        assert set(ranks(size, evaluate, kind(11))) == {(5.0, 11)}


def evaluate_with_noise(dataset, micro_batch):
    """For each record of this rank what the stream and torch draw for it; then the mean of a noisy metric."""
    with Run(global_batch=4, seed=3) as run:
        test, drawn = run.stream(dataset, micro_batch=micro_batch), {}
        for _ in range(2):  # another loop over the stream repeats its noise, as it should in the same epoch
            for x in test:
                rows = torch.cat([test.normal(2), test.random(3), test.normal(2), torch.randn(x.shape[0], 2)], dim=1)
                for record, row in zip(x.tolist(), rows.tolist(), strict=True):
                    assert drawn.setdefault(record, row) == row
        return drawn, run.mean((x + test.normal()).double() * test.random() for x in test)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Count, Parts])
def test_the_noise_of_an_evaluation_belongs_to_the_record(ranks, kind):
    ((expected, mean),) = ranks(1, evaluate_with_noise, kind(11), None)
    assert expected.keys() == set(range(11))
    assert len({number for row in expected.values() for number in row}) == 11 * 9
    for size, micro_batch in ((1, 3), (2, None), (3, 1)):
        found = ranks(size, evaluate_with_noise, kind(11), micro_batch)
        assert {record: row for drawn, _ in found for record, row in drawn.items()} == expected
        assert [value for _, value in found] == pytest.approx([mean] * size, rel=1e-12)


def sort_rows(samples):
    return torch.stack(sorted(samples, key=lambda sample: -float(sample[0])))


def test_a_collate_fn_that_sorts_a_stream_raises():
    with (
        Run(global_batch=4) as run,
        pytest.raises(DataError, match="collate_fn returns the rows of 4 samples in another order than it got them"),
    ):
        list(run.stream(Count(8), decode=with_random, collate_fn=sort_rows))


def test_invalid_streams_raise():
    with Run(global_batch=4) as run:
        with pytest.raises(DataError, match=r"has a length and items, so it is not a stream: use run\.shard"):
            run.stream(list(range(3)))
        stream = run.stream(Count(3))
        with pytest.raises(
            StateError, match=r"global_batch=8 and this stream has global_batch=4.*pass Run\(global_batch=8\)"
        ):
            stream.load_state_dict({**stream.state_dict(), "global_batch": 8})
        with pytest.raises(DataError, match="the number of steps of a stream is unknown"):
            len(next(iter(stream.epochs(1))))
    with (
        Run(global_batch=4, ledger=True) as run,
        pytest.raises(DataError, match="ledger=True does not support a stream in shards"),
    ):
        run.stream(Parts(3))


def resume(kind, folder):
    """Resume a finished run, or a stream in the middle of an epoch."""
    with Run(global_batch=4, folder=folder) as run:
        for epochs in (1, 2):
            rows = torch.arange(12.0)
            train = run.stream(Count(12), num_workers=0) if kind == "stream" else run.shard(rows, num_workers=0)
            state = train.state_dict()
            train.load_state_dict({**state, "epoch": epochs - 1, "step": 1} if epochs == 1 else {**state, "epoch": 3})
            for epoch in train.epochs(epochs):
                for step in epoch:
                    for _ in step:
                        pass


@pytest.mark.parametrize("kind", ["shard", "stream"])
def test_finished_epochs_and_rereading_a_stream_are_printed_once(ranks, tmp_path, kind):
    for size in (1, 2):
        ranks(size, resume, kind, tmp_path / str(size))
        log = (tmp_path / str(size) / "log.txt").read_text()
        assert (
            log.count("epochs(2): 3 epochs are already trained, nothing is left to do; epochs(4) trains one more") == 1
        )
        assert log.count("Count cannot seek: to resume at step 1 it is read from its beginning") == (kind == "stream")
