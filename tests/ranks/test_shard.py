"""Every sample once, on any number of ranks and workers: shards on real ranks."""

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
    """Item i is (i, luck of torch, luck of numpy, the epoch's setting)."""

    def __init__(self, n=N, lucky=False, settled=False):
        self.n, self.lucky, self.settled = n, lucky, settled

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        luck = (
            (float(torch.rand(1, generator=sample_rng())), float(sample_numpy_rng().random()))
            if self.lucky
            else (0.0, 0.0)
        )
        setting = epoch_setting() if self.settled else 0
        return torch.tensor([float(index), *luck, float(setting)], dtype=torch.float64)


def learn(epochs, global_batch, micro_batch, workers, state=None, stop_after=None, dataset=None, settings=None):
    """What each step learnt: {global step: rows of (index, luck, luck, setting) that counted}, and the last state."""
    with Run(global_batch=global_batch, seed=3) as run:
        train = run.shard(
            dataset or Numbers(lucky=True),
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


def together(parts):
    """The rows of all ranks, step by step, in rank order."""
    return {number: [row for seen, _ in parts for row in seen[number]] for number in parts[0][0]}


@pytest.mark.parametrize(("size", "micro_batch", "workers"), [(2, None, 0), (3, 2, 1), (4, 1, 0)])
def test_every_layout_learns_the_same_samples_with_the_same_luck(ranks, size, micro_batch, workers):
    alone = together(ranks(1, learn, 2, 6, None, 0))
    spread = together(ranks(size, learn, 2, 6, micro_batch, workers))
    assert spread == alone
    steps_per_epoch = 4
    for epoch in range(2):
        indices = [int(row[0]) for g in range(steps_per_epoch) for row in alone[epoch * steps_per_epoch + g]]
        assert sorted(indices) == list(range(N))
    first, second = ([row for g in range(4) for row in alone[4 * e + g]] for e in range(2))
    assert [r[0] for r in first] != [r[0] for r in second]
    luck = {(row[1], row[2]) for row in first + second}
    assert len(luck) == 2 * N  # its own for every sample and epoch


def learn_by_spawned_worker():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        return learn(1, 6, None, 1)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_worker_that_inherits_nothing_has_the_same_luck(ranks):
    alone = together(ranks(1, learn, 1, 6, None, 0))
    assert together(ranks(1, learn_by_spawned_worker)) == alone


def test_the_position_continues_on_another_world_size_and_worker_count(ranks):
    whole = together(ranks(1, learn, 3, 6, None, 0))
    parts = ranks(2, learn, 3, 6, 2, 1, None, 5)
    states = [state for _, state in parts]
    assert states[0] == states[1] == {"epoch": 1, "step": 2, "seed": 3, "n": N, "global_batch": 6, "shuffle": True}
    rest = together(ranks(3, learn, 3, 6, None, 0, states[0]))
    assert together(parts) | rest == whole
    assert not set(together(parts)) & set(rest)


def test_a_dataset_smaller_than_the_world_works(ranks):
    alone = together(ranks(1, learn, 2, 8, None, 0, None, None, Numbers(3, lucky=True)))
    spread = together(ranks(4, learn, 2, 8, None, 0, None, None, Numbers(3, lucky=True)))
    assert spread == alone
    assert [sorted(int(row[0]) for row in rows) for rows in spread.values()] == [[0, 1, 2], [0, 1, 2]]


def double(epoch):
    return 10 * (epoch + 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_setting_reaches_every_sample_of_its_epoch_and_none_of_another(ranks, workers):
    """Persistent workers with prefetched batches: the value travels with the index."""
    parts = ranks(2, learn, 3, 4, 1, workers, None, None, Numbers(settled=True), double)
    for number, rows in together(parts).items():
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


def evaluate_within_training(workers):
    with Run(global_batch=4, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True, num_workers=workers)
        order = []
        for epoch in train.epochs(1):
            for step in epoch:
                order += [int(i) for batch in step for i in batch[:, 0]]
                assert sorted(int(i) for batch in train for i in batch[:, 0]) == list(range(N))
        return order


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_in_the_midst_of_an_epoch_does_not_disturb_it(ranks, workers):
    assert sorted(ranks(1, evaluate_within_training, workers)[0]) == list(range(N))


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


def test_lengths_are_right(ranks):
    for count, steps, number in ranks(2, lengths):
        assert number == 0
        assert count == len(steps) == 4
        assert steps == [(2, 2, 6, 0, 0), (2, 2, 6, 1, 1), (2, 2, 6, 2, 2), (2, 2, 5, 3, 3)]


def drop(capture):
    with Run(global_batch=6) as run:
        said = []
        run._lifecycle.context.print = said.append
        train = run.shard(Numbers(), drop_last=True)
        seen = [int(i) for epoch in train.epochs(1) for step in epoch for batch in step for i in batch[:, 0]]
        return seen, said


def test_a_dropped_tail_is_said(ranks):
    seen, said = ranks(1, drop, True)[0]
    assert seen == list(range(18))
    assert "drop_last: 5 of 23 samples are left out of every epoch" in said


def test_position_is_saved_within_the_body_of_the_last_step():
    """A save in the last step must not lose the evaluation that follows it; one after the epoch must not repeat it."""
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
def test_a_position_of_other_data_is_refused(change, message):
    with Run(global_batch=6, seed=3) as run:
        train = run.shard(Numbers(), shuffle=True)
        with pytest.raises(StateError, match=message):
            train.load_state_dict({**train.state_dict(), **change})


def test_a_position_that_does_not_tell_of_a_shuffle_is_taken():
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


def test_bad_datasets_are_explained():
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


def test_weights_draw_with_replacement_alike_on_any_layout(ranks):
    alone = ranks(1, weighted)[0]
    assert set(alone) == {2, 7}
    assert 0.65 < alone.count(7) / len(alone) < 0.85
    spread = ranks(2, weighted)
    assert sorted(spread[0] + spread[1]) == sorted(alone)


def weigh():
    """What each rank is told of the rows of a step of five."""
    with Run(global_batch=5) as run:
        told = []
        for epoch in run.shard(Numbers(n=5), num_workers=0).epochs(1):
            for step in epoch:
                told += [(rows[:, 0].tolist(), step.weights.tolist()) for rows in step]
        return told


def test_rows_of_padding_weigh_nothing(ranks):
    assert ranks(1, weigh) == [[([0, 1, 2, 3, 4], [1, 1, 1, 1, 1])]]
    (first,), (second,) = ranks(2, weigh)
    assert first == ([0, 1, 2], [1, 1, 1])
    assert second[0][:2] == [3, 4]
    assert second[1] == [1, 1, 0]


class Collecting(Dataset):
    """Collects all garbage of the process that reads it."""

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


def read_after_a_run_that_is_garbage():
    gc.disable()  # what is left of the first run waits for a worker to collect it
    try:
        train_once()
        with Run(global_batch=3) as run:
            return run.sum(batch for batch in run.shard(Collecting(), num_workers=1))
    finally:
        gc.enable()


def test_workers_do_not_collect_what_an_earlier_run_left(ranks):
    assert ranks(2, read_after_a_run_that_is_garbage) == [15, 15]


def test_an_evaluation_after_a_restart_has_the_setting_that_it_had_before():
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
