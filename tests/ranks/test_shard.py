"""Shards on real ranks: every sample once, on any number of ranks and workers."""

import gc
import multiprocessing

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from samestep import Run, epoch_setting, sample_numpy_rng, sample_rng
from samestep.errors import DataError, StateError

N = 23


class Numbers(Dataset):
    """Item i is (i, a torch random number, a numpy random number, the epoch setting)."""

    def __init__(self, n=N, random=False, settled=False):
        self.n, self.random, self.settled = n, random, settled

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        numbers = (
            (float(torch.rand(1, generator=sample_rng())), float(sample_numpy_rng().random()))
            if self.random
            else (0.0, 0.0)
        )
        setting = epoch_setting() if self.settled else 0
        return torch.tensor([float(index), *numbers, float(setting)], dtype=torch.float64)


def train(epochs, global_batch, micro_batch, workers, state=None, stop_after=None, dataset=None, settings=None):
    """{global step: rows of (index, random, random, setting) that counted}, and the last position."""
    with Run(global_batch=global_batch, seed=3) as run:
        train = run.shard(
            dataset or Numbers(random=True),
            shuffle=True,
            micro_batch=micro_batch,
            num_workers=workers,
            epoch_settings=settings,
        )
        if state is not None:
            train.load_state_dict(state)
        seen = {}
        for epoch in train.epochs(epochs):
            for step in epoch:
                rows = seen.setdefault(step.number, [])
                for batch in step:
                    weights = step._current.weights
                    own = [torch.rand(1, generator=step.rng(row)) for row in range(len(batch))]
                    noise = torch.cat([step.random(2), torch.stack(own)], dim=1)
                    assert len(batch) == len(weights) == len(noise)
                    rows += [
                        (*row.tolist(), *draw.tolist()) for row, w, draw in zip(batch, weights, noise, strict=True) if w
                    ]
                if stop_after is not None and step.number == stop_after:
                    return seen, train.state_dict()
        return seen, train.state_dict()


def by_step(parts):
    """The rows of all ranks, step by step, in rank order."""
    return {number: [row for seen, _ in parts for row in seen[number]] for number in parts[0][0]}


@pytest.mark.parametrize(("size", "micro_batch", "workers"), [(2, None, 0), (3, 2, 1), (4, 1, 0)])
def test_every_layout_trains_the_same_samples_with_the_same_random_numbers(ranks, size, micro_batch, workers):
    alone = by_step(ranks(1, train, 2, 6, None, 0))
    spread = by_step(ranks(size, train, 2, 6, micro_batch, workers))
    assert spread == alone
    steps_per_epoch = 4
    for epoch in range(2):
        indices = [int(row[0]) for g in range(steps_per_epoch) for row in alone[epoch * steps_per_epoch + g]]
        assert sorted(indices) == list(range(N))
    first, second = ([row for g in range(4) for row in alone[4 * e + g]] for e in range(2))
    assert [r[0] for r in first] != [r[0] for r in second]
    numbers = {(row[1], row[2]) for row in first + second}
    assert len(numbers) == 2 * N  # different for every sample and epoch


def train_with_spawned_worker():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        return train(1, 6, None, 1)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_spawned_worker_draws_the_same_random_numbers(ranks):
    alone = by_step(ranks(1, train, 1, 6, None, 0))
    assert by_step(ranks(1, train_with_spawned_worker)) == alone


def test_the_position_continues_on_another_world_size_and_worker_count(ranks):
    whole = by_step(ranks(1, train, 3, 6, None, 0))
    parts = ranks(2, train, 3, 6, 2, 1, None, 5)
    states = [state for _, state in parts]
    assert states[0] == states[1] == {"epoch": 1, "step": 2, "seed": 3, "n": N, "global_batch": 6, "shuffle": True}
    rest = by_step(ranks(3, train, 3, 6, None, 0, states[0]))
    assert by_step(parts) | rest == whole
    assert not set(by_step(parts)) & set(rest)


def test_a_dataset_smaller_than_the_world_works(ranks):
    alone = by_step(ranks(1, train, 2, 8, None, 0, None, None, Numbers(3, random=True)))
    spread = by_step(ranks(4, train, 2, 8, None, 0, None, None, Numbers(3, random=True)))
    assert spread == alone
    assert [sorted(int(row[0]) for row in rows) for rows in spread.values()] == [[0, 1, 2], [0, 1, 2]]


def double(epoch):
    return 10 * (epoch + 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_setting_reaches_every_sample_of_its_epoch_only(ranks, workers):
    """Workers are persistent and prefetch batches: the value is sent with the indices."""
    parts = ranks(2, train, 3, 4, 1, workers, None, None, Numbers(settled=True), double)
    for number, rows in by_step(parts).items():
        assert {row[3] for row in rows} == {10.0 * (number // 6 + 1)}


def evaluate(n, global_batch, workers=0):
    with Run(global_batch=global_batch) as run:
        test = run.shard(Numbers(n), num_workers=workers)
        batches = list(test)
        assert len(batches) == len(test)
        mean = run.mean(batch[:, 0] for batch in test)
        return [int(i) for batch in batches for i in batch[:, 0]], mean


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 1), (4, 0)])
def test_an_evaluation_counts_each_sample_once(ranks, size, workers):
    parts = ranks(size, evaluate, 10, 4, workers)
    assert [index for indices, _ in parts for index in indices] == list(range(10))
    assert {mean for _, mean in parts} == {4.5}


def evaluate_during_training(workers):
    with Run(global_batch=4, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True, num_workers=workers)
        order = []
        for epoch in train.epochs(1):
            for step in epoch:
                order += [int(i) for batch in step for i in batch[:, 0]]
                assert sorted(int(i) for batch in train for i in batch[:, 0]) == list(range(N))
        return order


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_in_the_middle_of_an_epoch_does_not_disturb_it(ranks, workers):
    assert sorted(ranks(1, evaluate_during_training, workers)[0]) == list(range(N))


def lengths():
    with Run(global_batch=6) as run:
        train = run.shard(Numbers(), micro_batch=2)
        for epoch in train.epochs(1):
            count = len(epoch)
            steps = [
                (len(step), sum(1 for _ in step), step.samples, step.number, step.position.index) for step in epoch
            ]
            return count, steps, epoch.number
    return None


def test_lengths_of_epochs_and_steps(ranks):
    for count, steps, number in ranks(2, lengths):
        assert number == 0
        assert count == len(steps) == 4
        assert steps == [(2, 2, 6, 0, 0), (2, 2, 6, 1, 1), (2, 2, 6, 2, 2), (2, 2, 5, 3, 3)]


def drop(capture):
    with Run(global_batch=6) as run:
        printed = []
        run._lifecycle.context.print = printed.append
        train = run.shard(Numbers(), drop_last=True)
        seen = [int(i) for epoch in train.epochs(1) for step in epoch for batch in step for i in batch[:, 0]]
        return seen, printed


def test_samples_dropped_by_drop_last_are_printed(ranks):
    seen, printed = ranks(1, drop, True)[0]
    assert seen == list(range(18))
    assert "drop_last: 5 of 23 samples are left out of every epoch" in printed


def test_the_position_in_the_body_of_the_last_step_is_before_the_epoch_end():
    """A save in the last step keeps the evaluation after it; a save after the epoch does not repeat it."""
    with Run(global_batch=12, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True)
        states = []
        for epoch in train.epochs(1):
            for step in epoch:
                before = train.state_dict()
                for _ in step:
                    pass
                states.append((before["step"], train.state_dict()["step"], train.state_dict()["epoch"]))
            after = train.state_dict()
        assert states == [(0, 1, 0), (1, 2, 0)]
        assert (after["epoch"], after["step"]) == (1, 0)
        within = run.shard(Numbers(), shuffle=True)
        within.load_state_dict({**after, "epoch": 0, "step": 2})
        assert [(epoch.number, len(list(epoch))) for epoch in within.epochs(1)] == [(0, 0)]
        finished = run.shard(Numbers(), shuffle=True)
        finished.load_state_dict(after)
        assert list(finished.epochs(1)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 24}, "the saved position has n=24 and this shard has n=23.*pass the same dataset"),
        ({"global_batch": 8}, r"global_batch=8 and this shard has global_batch=6.*pass Run\(global_batch=8\)"),
        ({"seed": 9}, r"seed=9 and this shard has seed=3.*pass Run\(seed=9\)"),
        ({"shuffle": False}, r"shuffle=False and this shard has shuffle=True.*pass run\.shard\(shuffle=False\)"),
    ],
)
def test_a_position_of_another_dataset_raises(change, message):
    with Run(global_batch=6, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True)
        with pytest.raises(StateError, match=message):
            train.load_state_dict({**train.state_dict(), **change})


def test_a_position_without_shuffle_is_accepted():
    with Run(global_batch=6, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True)
        state = {**train.state_dict(), "step": 2}
        del state["shuffle"]
        train.load_state_dict(state)
        assert train.steps_left() == 2


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("cannot read part-5")
        return super().__getitem__(index)


class Odd(Numbers):
    def __getitem__(self, index):
        return torch.zeros(index + 1)


def read_all(dataset, workers, collate=None):
    with Run(global_batch=6) as run:
        for _ in run.shard(dataset, num_workers=workers, collate_fn=collate):
            pass


def test_invalid_datasets_raise():
    with pytest.raises(DataError, match=r"NoLength has no length.*use run.stream"):
        read_all(NoLength(), 0)
    with pytest.raises(DataError, match="Numbers is empty, so there is nothing to shard: check the path"):
        read_all(Numbers(0), 0)
    with pytest.raises(
        DataError, match=r"collate_fn could not make a batch of 6 samples on rank 0.*pass run.shard a collate_fn="
    ):
        read_all(Odd(), 0)
    with pytest.raises(
        DataError, match=r"batch\[1\] is of class object: a batch is a tensor, or tuples, lists and dicts of tensors"
    ):
        read_all(Numbers(), 0, lambda samples: (torch.stack(samples), object()))


@pytest.mark.parametrize(("workers", "where"), [(0, "in the training process"), (1, "worker 0")])
def test_a_sample_that_fails_is_named(ranks, workers, where):
    text = ranks.errors(1, read_all, Broken(), workers)[0]
    assert f"SampleError: sample 5 could not be read on rank 0, {where}: OSError: cannot read part-5" in text or (
        f"sample 5 could not be read on rank 0, {where}: OSError: cannot read part-5" in text
    )


def sort_rows(samples):
    return torch.stack(sorted(samples, key=lambda sample: float(sample[0])))


def train_sorted(workers):
    with Run(global_batch=10, seed=0) as run:
        for epoch in run.shard(Numbers(), shuffle=True, num_workers=workers, collate_fn=sort_rows).epochs(1):
            for step in epoch:
                for _ in step:
                    pass


@pytest.mark.parametrize(("size", "workers"), [(3, 0), (1, 1)])
def test_a_collate_fn_that_sorts_raises_at_the_first_batch(ranks, size, workers):
    for text in ranks.errors(size, train_sorted, workers):
        assert "DataError" in text
        assert "in another order than it got them, so padding and random numbers would go to the wrong samples" in text


def weighted():
    with Run(global_batch=8, seed=1) as run:
        weights = torch.zeros(N)
        weights[[2, 7]] = torch.tensor([1.0, 3.0])
        train = run.shard(Numbers(), sampling_weights=weights)
        return [
            int(i)
            for epoch in train.epochs(20)
            for step in epoch
            for batch in step
            for i in batch[:, 0][step._current.weights > 0]
        ]


def test_sampling_weights_draw_the_same_samples_on_any_layout(ranks):
    alone = ranks(1, weighted)[0]
    assert set(alone) == {2, 7}
    assert 0.65 < alone.count(7) / len(alone) < 0.85
    spread = ranks(2, weighted)
    assert sorted(spread[0] + spread[1]) == sorted(alone)


def row_weights():
    """step.weights of each rank in a step of five samples."""
    with Run(global_batch=5) as run:
        seen = []
        for epoch in run.shard(Numbers(n=5), num_workers=0).epochs(1):
            for step in epoch:
                seen += [(rows[:, 0].tolist(), step.weights.tolist()) for rows in step]
        return seen


def test_padding_rows_have_weight_zero(ranks):
    assert ranks(1, row_weights) == [[([0, 1, 2, 3, 4], [1, 1, 1, 1, 1])]]
    (first,), (second,) = ranks(2, row_weights)
    assert first == ([0, 1, 2], [1, 1, 1])
    assert second[0][:2] == [3, 4]
    assert second[1] == [1, 1, 0]


class Collecting(Dataset):
    """Runs the garbage collector in the process that reads it."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(index)


def train_once():
    with Run(global_batch=3) as run:
        model = run.wrap(nn.Linear(1, 1))
        for epoch in run.shard([torch.ones(1)] * 3).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x)).backward()


def read_after_an_uncollected_run():
    gc.disable()  # the first run is garbage that a worker could collect
    try:
        train_once()
        with Run(global_batch=3) as run:
            return run.sum(batch for batch in run.shard(Collecting(), num_workers=1))
    finally:
        gc.enable()


def test_workers_do_not_collect_garbage_of_an_earlier_run(ranks):
    assert ranks(2, read_after_an_uncollected_run) == [15, 15]


def test_an_evaluation_after_a_restart_has_the_same_epoch_setting():
    def settings_of(test):
        return {int(batch[0, 3]) for batch in test}

    before, after = {}, {}
    with Run(global_batch=16) as run:
        train, test = (run.shard(Numbers(settled=True), num_workers=0, epoch_settings=double) for _ in range(2))
        for epoch in train.epochs(3):
            for step in epoch:
                for _ in step:
                    pass
                before[epoch.number, step.number] = (settings_of(test), train.state_dict())
            before[epoch.number, "over"] = (settings_of(test), train.state_dict())
    for place, (_, state) in before.items():
        with Run(global_batch=16) as run:
            train, test = (run.shard(Numbers(settled=True), num_workers=0, epoch_settings=double) for _ in range(2))
            train.load_state_dict(state)
            after[place] = (settings_of(test), state)
    assert after == before
    assert len({frozenset(seen) for seen, _ in before.values()}) == 3
