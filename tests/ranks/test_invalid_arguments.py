"""Invalid arguments of Run, run.shard, run.wrap and run.evaluate raise before anything starts."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run
from samestep.errors import CommunicationError, ConfigError, DataError, WrapError


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def numbers():
    return TensorDataset(torch.arange(10.0).reshape(-1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": "256"}, "global_batch='256' must be an integer of at least 1, e.g. global_batch="),
        ({"global_batch": 2.5}, "global_batch=2.5 must be an integer of at least 1"),
        ({"global_batch": 0}, "global_batch=0 must be an integer of at least 1"),
        ({"seed": None}, "seed=None must be a 64-bit integer, e.g. seed=0"),
        ({"seed": 1 << 64}, "seed=18446744073709551616 must be a 64-bit integer"),
        (
            {"replica_check_every": -1},
            "replica_check_every=-1 must be an integer number of steps, or 0 to turn it off",
        ),
        ({"start_timeout": 0}, "start_timeout=0 must be a number of seconds above 0, e.g. start_timeout=1800"),
        ({"step_timeout": "5m"}, "step_timeout='5m' must be a number of seconds above 0, e.g. step_timeout="),
    ],
)
def test_invalid_numbers_raise_before_the_run_starts(options, message):
    with pytest.raises(ConfigError) as caught:
        Run(**{"global_batch": 4, **options})
    assert str(caught.value).startswith(message)


def test_a_run_that_is_not_started_has_no_folder():
    with pytest.raises(CommunicationError, match="this run is not started: use `with Run"):
        _ = Run(global_batch=4).folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, "micro_batch=0 is not a number of rows: pass 1 or more, or omit it to pass each"),
        ({"micro_batch": 2.5}, "micro_batch=2.5 is not a number of rows: pass 1 or more"),
        ({"num_workers": -1}, "num_workers=-1 is not a number of data workers: pass 0 to 1024"),
        ({"num_workers": "2"}, "num_workers='2' is not a number of data workers: pass 0 to 1024"),
    ],
)
def test_invalid_micro_batch_and_num_workers_raise(options, message):
    with Run(global_batch=4) as run:
        for take, data in ((run.shard, numbers()), (run.stream, Count())):
            with pytest.raises(DataError) as caught:
                take(data, **options)
            assert str(caught.value).startswith(message)


def test_sampling_weights_must_be_a_tensor():
    with Run(global_batch=4) as run:
        with pytest.raises(
            DataError, match=r"sampling_weights is a list and must be a tensor .*sampling_weights=torch\.as_tensor\("
        ):
            run.shard(numbers(), sampling_weights=[1.0] * 10)
        assert len(run.shard(numbers(), sampling_weights=torch.ones(10, requires_grad=True))) == 3


def test_evaluating_something_else_than_a_module_raises():
    message = r"run\.evaluate needs a torch\.nn\.Module, got int: pass the model that run\.wrap returned"
    with Run(global_batch=4) as run, pytest.raises(WrapError, match=message), run.evaluate(3):
        pass


@pytest.mark.parametrize("name", ["blocks", "activation_checkpointing"])
def test_a_class_instead_of_a_tuple_raises(name):
    message = rf"{name}=Linear must be a tuple of classes: pass {name}=\(Block,\), with a comma"
    with Run(global_batch=4) as run, pytest.raises(WrapError, match=message):
        run.wrap(torch.nn.Sequential(torch.nn.Linear(1, 1)), "fsdp", **{name: torch.nn.Linear})
