"""A run that is closed: closing it again does nothing, and everything else of it says that it is closed."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run
from samestep.checkpoint.checkpoint import Checkpoint
from samestep.errors import CommunicationError, SamestepError
from samestep.teacher.teacher import Teacher
from samestep.training.evaluation import EarlyStopping
from samestep.training.shard import Shard
from samestep.training.step import Step
from samestep.training.stream import Stream


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(8))


CLOSED = "closed"
OF_A_STEP = "has no current micro-batch|was iterated too often|is over"
OUTSIDE = "was called outside of"
# Every public method, with arguments and what the error says.
CALLS = {
    Run: {
        "__enter__": ((), CLOSED), "agree": ((True,), CLOSED), "all_reduce": ((torch.ones(1), "sum"), CLOSED),
        "average": ((nn.Linear(1, 1),), CLOSED), "barrier": ((), CLOSED), "checkpoint": (("out",), CLOSED),
        "early_stopping": ((1,), CLOSED), "evaluate": ((nn.Linear(1, 1),), CLOSED),
        "gather": ((torch.ones(1),), CLOSED), "gather_objects": ((1,), CLOSED), "log": (({"a": 1.0},), CLOSED),
        "max": (([1],), CLOSED), "mean": (([1],), CLOSED), "means": (([{"a": 1}],), CLOSED),
        "metric": ((None,), CLOSED), "once": ((int,), CLOSED), "predict": ((iter([1]),), CLOSED),
        "profile": ((range(2),), CLOSED), "save_pretrained": ((nn.Linear(1, 1), "out"), CLOSED),
        "shard": (([1, 2],), CLOSED), "start": ((), CLOSED), "stream": (([1, 2],), CLOSED), "sum": (([1],), CLOSED),
        "teacher": ((lambda: nn.Linear(1, 1),), CLOSED), "wrap": ((nn.Linear(1, 1),), CLOSED),
    },
    Shard: {
        "__iter__": ((), CLOSED), "epochs": ((2,), CLOSED), "steps": ((1,), CLOSED), "random": ((), OUTSIDE),
        "normal": ((), OUTSIDE),
    },
    Stream: {
        "__iter__": ((), CLOSED), "epochs": ((2,), CLOSED), "steps": ((1,), CLOSED), "random": ((), OUTSIDE),
        "normal": ((), OUTSIDE),
    },
    Step: {
        "__iter__": ((), OF_A_STEP), "finite": ((), CLOSED), "log": (({},), OF_A_STEP),
        "mean": ((torch.ones(1),), OF_A_STEP), "normal": ((), OF_A_STEP), "random": ((), OF_A_STEP),
        "rng": ((0,), OF_A_STEP), "sum": ((torch.ones(1),), OF_A_STEP),
    },
    Checkpoint: {"every": ((), CLOSED), "save": ((), CLOSED)},
    EarlyStopping: {"update": ((1.0,), CLOSED)},
    Teacher: {"__call__": ((torch.ones(1, 1),), CLOSED), "submit": ((torch.ones(1, 1),), CLOSED)},
}  # fmt: skip
STILL_WORK = {
    Run: {"close", "print"},
    Shard: {"__len__", "state_dict", "load_state_dict", "steps_left"},
    Stream: {"state_dict", "load_state_dict"},
    Step: {"__len__", "close", "record_loss"},
    Checkpoint: {"wait", "on_run_end", "on_step_end", "on_sync", "on_sync_table", "save_before_exit", "save_seconds",
                 "sync_table", "sync_value", "wants_sync"},
    EarlyStopping: {"state_dict", "load_state_dict"},
    Teacher: {"close", "describe", "summary"},
}  # fmt: skip


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """One object of each class, of a run that was closed."""
    folder = tmp_path_factory.mktemp("closed")
    run = Run(global_batch=4, folder=folder).start()
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(8.0)[:, None]
    shard, stream = run.shard(TensorDataset(x, x)), run.stream(Count())
    checkpoint = run.checkpoint(folder / "out", model=model, optimizer=optimizer, data=shard)
    save_file(nn.Linear(1, 1).state_dict(), folder / "teacher.safetensors")
    stopping = run.early_stopping(patience=1)
    teacher = run.teacher(lambda: nn.Linear(1, 1), weights=folder / "teacher.safetensors", placement="cpu")
    for epoch in shard.epochs(1):
        for step in epoch:
            for inputs, targets in step:
                step.mean((model(inputs) - targets).pow(2).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    of_run = {Run: run, Shard: shard, Stream: stream, Step: step, Checkpoint: checkpoint, Teacher: teacher}
    return of_run | {EarlyStopping: stopping}


def public_methods(kind):
    special = {"__iter__", "__len__", "__call__", "__enter__"}
    return {
        name for name in dir(kind) if (not name.startswith("_") or name in special) and callable(getattr(kind, name))
    }


def consume(answer):
    """Run the loops of generators, which begin with the first item."""
    if isinstance(answer, Iterator):
        for part in answer:
            consume(iter(part))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, calls in CALLS.items() for name in calls])
def test_every_method_of_a_closed_run_says_so(closed, kind, name):
    arguments, text = CALLS[kind][name]
    with pytest.raises(SamestepError, match=text):
        consume(getattr(closed[kind], name)(*arguments))


@pytest.mark.parametrize("kind", list(CALLS))
def test_no_public_method_was_forgotten(kind):
    assert public_methods(kind) == CALLS[kind].keys() | STILL_WORK[kind]


def test_what_needs_no_other_rank_still_works(closed, capsys):
    run, shard, checkpoint = closed[Run], closed[Shard], closed[Checkpoint]
    assert (run.rank, run.size, run.is_main, run.folder.exists()) == (0, 1, True, True)
    run.close()
    run.close()
    checkpoint.wait()
    shard.load_state_dict(shard.state_dict())
    run.print("still here")
    assert "still here" in capsys.readouterr().out


def close_twice():
    run = Run(global_batch=8).start()
    run.close()
    run.close()
    try:
        run.barrier()
    except CommunicationError as error:
        return str(error)


def test_on_several_ranks_a_second_close_waits_for_no_rank(ranks):
    for text in ranks(2, close_twice):
        assert text.startswith("run.barrier at test_closed_run.py:")
        assert "was called on a run that is closed: call it inside `with Run(...) as run:`" in text


def test_a_failed_run_is_closed():
    run = Run(global_batch=8)
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    with pytest.raises(CommunicationError, match="this run is closed: use it inside `with Run"):
        run.log({"loss": 1.0})
    run.close()
