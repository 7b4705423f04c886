"""Data or options that differ between ranks are errors at the first step, and the audit never certifies them."""

import itertools
import os
import random
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from samestep import Run
from samestep.cli.audit_command import command
from samestep.data.audit import audit
from samestep.messages import SamestepWarning

N = 100


def rank():
    return int(os.environ.get("RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


def unseeded():
    return TensorDataset(torch.rand(N, 3, generator=torch.Generator().manual_seed(rank())), torch.arange(N))


def split_by_rank():
    return list(range(2 * N))[rank() :: 2]


def listed_in_another_order():
    names = [f"{number:03}.png" for number in range(N)]
    return names if rank() == 0 else names[::-1]


class Rotated(Dataset):
    """Draws from a generator that every rank seeds for itself."""

    def __init__(self):
        self.rng = np.random.default_rng(rank())

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"image": torch.full((2, 2), self.rng.random()), "name": f"{index}.png"}


def train(build, folder=None, workers=0, stream=False, **options):
    with Run(global_batch=10, seed=0, folder=folder, ledger=folder is not None) as run:
        data = build()
        shard = run.stream(data, num_workers=workers) if stream else run.shard(data, num_workers=workers, **options)
        samples = 0
        for epoch in shard.epochs(1):
            for step in epoch:
                for _ in step:
                    samples += int(step.weights.sum())
    return samples


def errors(ranks, *arguments, size=2):
    """The last line of the error of each rank."""
    return [text.strip().splitlines()[-1] for text in ranks.errors(size, *arguments)]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_each_rank_draws_for_itself_is_an_error_at_the_first_step(ranks, workers):
    for error in errors(ranks, train, unseeded, None, workers):
        assert "samestep.errors.DataError: TensorDataset differs between ranks: sample 0 is " in error
        assert ", ... of shape" not in error
        assert "on rank 1 (6 of 6 compared samples differ). Build the dataset in the same way on every rank" in error


def test_a_dataset_split_by_rank_is_an_error_that_names_the_samples(ranks):
    for error in errors(ranks, train, split_by_rank):
        assert "list differs between ranks: sample 0 is 0 on rank 0 and 1 on rank 1 (6 of 6 compared" in error
        assert "do not select samples by rank, since run.shard does that" in error


def test_files_in_another_order_are_an_error(ranks):
    for error in errors(ranks, train, listed_in_another_order, size=3):
        assert "list differs between ranks: sample 0 is '000.png' on rank 0 and '099.png' on rank 1 (6 of 6" in error


def test_a_dataset_with_a_generator_of_its_own_is_an_error_between_ranks(ranks):
    for error in errors(ranks, own_generator):
        assert "Rotated differs between ranks: sample 0 is 'image', " in error


def own_generator():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sample 0 of Rotated differs when it is read again")
        train(Rotated)


def warned_of_own_generator(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Rotated, folder)
    return [str(each.message) for each in caught if each.category is SamestepWarning]


def test_a_sample_that_differs_when_it_is_read_again_is_a_warning(ranks, tmp_path):
    ((warned,),) = ranks(1, warned_of_own_generator, tmp_path)
    assert warned.startswith("sample 0 of Rotated differs when it is read again with the same random state ('image', ")
    assert "so results depend on the number of ranks and workers: draw only from the global generators" in warned


def pass_other_options():
    options = {"shuffle": rank() == 0} if N else {}
    train(lambda: list(range(N)), **options)


def pass_other_weights():
    train(lambda: list(range(N)), sampling_weights=torch.arange(1.0, N + 1) + rank())


@pytest.mark.slow
def test_options_that_differ_between_ranks_are_an_error(ranks):
    for error in errors(ranks, pass_other_options):
        assert error.endswith(
            "run.shard has shuffle=True on rank 0 and shuffle=False on rank 1, so the ranks would not train the same "
            "steps: pass the same arguments on every rank"
        )
    for error in errors(ranks, pass_other_weights):
        assert "run.shard has sampling_weights=" in error


class SplitsItself(IterableDataset):
    """As in scripts for DistributedDataParallel, and as split_dataset_by_node of Hugging Face."""

    def __iter__(self):
        return itertools.islice(range(N), rank(), None, world_size())


class SeededByRank(IterableDataset):
    def __iter__(self):
        numbers = list(range(N))
        random.Random(rank()).shuffle(numbers)
        return iter(numbers)


class SeededByClock(IterableDataset):
    def __iter__(self):
        numbers = list(range(N))
        random.Random(time.time_ns()).shuffle(numbers)
        return iter(numbers)


class NothingOnRank1(IterableDataset):
    def __iter__(self):
        return iter(range(N if rank() == 0 else 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_splits_itself_is_an_error_at_the_first_step(ranks, workers):
    for error in errors(ranks, train, SplitsItself, None, workers, True):
        assert "the stream SplitsItself differs between ranks: record 0 is 0 on rank 0 and 1 on rank 1." in error
        assert "no data[rank::world_size], no split_dataset_by_node" in error
        assert error.endswith("run.stream selects the records of each rank")


def test_a_stream_seeded_by_rank_is_an_error(ranks):
    for error in errors(ranks, train, SeededByRank, None, 0, True):
        assert "the stream SeededByRank differs between ranks: record 0 is " in error


def test_a_stream_that_has_records_on_one_rank_only_is_an_error(ranks):
    for error in errors(ranks, train, NothingOnRank1, None, 0, True):
        assert "the first 4 records are not there on every rank: 4 on rank 0, 0 on rank 1" in error


def test_a_stream_that_differs_between_workers_is_an_error_on_one_rank(ranks):
    (error,) = errors(ranks, train, SeededByClock, None, 2, True, size=1)
    assert "the stream SeededByClock differs between data workers of this rank: record " in error


class Sharded(IterableDataset):
    num_shards = 4

    def shard(self, index):
        return iter(range(rank() * 1000 + index * 25, rank() * 1000 + index * 25 + 25))

    def __iter__(self):
        return itertools.chain.from_iterable(map(self.shard, range(4)))


def test_shards_that_differ_between_ranks_are_an_error(ranks):
    for error in errors(ranks, train, Sharded, None, 0, True):
        assert "the stream Sharded differs between ranks: record 0 is 0 on rank 0 and 1000 on rank 1" in error


def differs_on_rank_2():
    return [number + (rank() == 2) for number in range(N)]


def shorter_on_rank_2():
    return list(range(N - (rank() == 2)))


class OtherOnRank2(IterableDataset):
    def __iter__(self):
        return iter(range(5 * (rank() == 2), N))


class ShorterOnRank2(IterableDataset):
    def __iter__(self):
        return iter(range(N if rank() < 2 else 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "stream", "message"),
    [
        (differs_on_rank_2, False, "list differs between ranks: sample 0 is 0 on rank 0 and 1 on rank 2 (6 of 6"),
        (shorter_on_rank_2, False, "same length on all ranks: 100 on rank 0, 100 on rank 1, 99 on rank 2; pass the"),
        (OtherOnRank2, True, "OtherOnRank2 differs between ranks: record 0 is 0 on rank 0 and 5 on rank 2."),
        (ShorterOnRank2, True, "4 records are not there on every rank: 4 on rank 0, 4 on rank 1, 3 on rank 2."),
        (SplitsItself, True, "SplitsItself differs between ranks: record 0 is 0 on rank 0 and 1 on rank 1."),
    ],
)
def test_of_three_ranks_the_one_that_differs_is_named(ranks, build, stream, message):
    for error in errors(ranks, train, build, None, 0, stream, size=3):
        assert error.startswith("samestep.errors.DataError: ")
        assert message in error


def evaluate_unseeded():
    with Run(global_batch=10, seed=0) as run:
        return run.mean(inputs for inputs, _ in run.shard(unseeded()))


def test_an_evaluation_of_different_data_is_an_error(ranks):
    for error in errors(ranks, evaluate_unseeded):
        assert "TensorDataset differs between ranks: sample 0 is " in error


@pytest.mark.parametrize(("build", "stream"), [(SplitsItself, True), (split_by_rank, False)])
def test_the_audit_does_not_certify_a_run_whose_ranks_read_different_data(ranks, tmp_path, build, stream):
    ranks.errors(2, train, build, tmp_path, 0, stream)
    answer = CliRunner().invoke(command, [str(tmp_path)])
    assert answer.exit_code == 1
    noun = "record" if stream else "sample"
    assert f"{noun} 0 was not the same for rank 0 of generation 0 and rank 1 of generation 0" in answer.output


def seeded_by_variable():
    return torch.rand(N, 3, generator=torch.Generator().manual_seed(int(os.environ["DATA_SEED"])))


def train_seeded(folder, seed):
    os.environ["DATA_SEED"] = str(seed)
    return train(seeded_by_variable, folder)


@pytest.mark.slow
def test_data_that_changed_between_two_starts_is_an_error_and_never_certified(ranks, tmp_path):
    assert sum(ranks(2, train_seeded, tmp_path, 1)) == N
    assert audit(tmp_path).exactly_once
    assert sum(ranks(1, train_seeded, tmp_path, 1)) == N
    report = audit(tmp_path)
    assert report.exactly_once
    assert report.shards[0].notes == ()
    for text in ranks.errors(2, train_seeded, tmp_path, 2):
        assert "shows that sample 0 was another one at an earlier start of this run" in text
    assert not audit(tmp_path).exactly_once


class OpensInWorker(Dataset):
    """Opens its file on the first read, as datasets of HDF5 files do: a handle must not be inherited by a worker."""

    pid = None

    def __len__(self):
        return N

    def __getitem__(self, index):
        assert get_worker_info() is not None
        self.pid = self.pid or os.getpid()
        assert self.pid == os.getpid()
        return index


def test_the_samples_to_compare_are_read_by_the_data_worker(ranks):
    assert sum(ranks(2, train, OpensInWorker, None, 1)) == N


class CannotReadAll(Dataset):
    """Samples that the order never draws, since they have no weight, may be broken."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index in (0, N - 1):
            raise OSError("broken file")
        return index


def train_with_broken_samples():
    weights = torch.ones(N)
    weights[[0, N - 1]] = 0
    return train(CannotReadAll, sampling_weights=weights)


def test_a_sample_that_no_rank_can_read_is_not_a_difference(ranks):
    assert sum(ranks(2, train_with_broken_samples)) == N


@pytest.mark.parametrize("stream", [False, True])
def test_equal_data_trains_and_one_collective_is_enough(ranks, tmp_path: Path, stream):
    assert sum(ranks(2, count_comparisons, stream)) == 2


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(N))


def count_comparisons(stream):
    with Run(global_batch=10, seed=0) as run:
        data = run.stream(Count()) if stream else run.shard(list(range(N)))
        comm, found = run._lifecycle.context.comm, []
        exchange = comm.exchange_objects
        comm.exchange_objects = lambda operation, value: found.append(operation) or exchange(operation, value)
        for epoch in data.epochs(2):
            for step in epoch:
                for _ in step:
                    pass
        for _ in data:
            pass
        return sum("comparison" in operation for operation in found)
