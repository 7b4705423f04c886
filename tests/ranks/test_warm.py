"""The pool of warm ranks: results, errors, hangs, and the state that is restored after a job."""

import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

from tests.warm import RankFailed

pytestmark = pytest.mark.slow


def train_a_little(steps):
    """Open a process group from the environment, train with DDP, close it: what Run does, by hand."""
    import gc

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(steps):
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    gradient = model.module.weight.grad.flatten().tolist()
    del model
    gc.collect()
    dist.destroy_process_group()
    return gradient


def raise_on(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} failed on purpose")
    dist.barrier()


def raise_everywhere():
    raise ValueError(f"rank {os.environ.get('RANK', 'alone')} failed on purpose")


def raise_everywhere_in_a_group():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    raise_everywhere()


def wait_forever_on(rank):
    while os.environ["RANK"] == str(rank):
        time.sleep(0.1)
    return os.getpid()


def process_id():
    return os.getpid()


def launcher_variables():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    return [os.environ.get(name) for name in names]


def leave_a_group_open():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def change_everything():
    import numpy
    import torch

    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)


def state():
    import numpy
    import torch

    draws = random.random(), numpy.random.random(), torch.rand(()).item()
    settings = torch.get_default_dtype(), str(torch.get_default_device()), torch.get_num_threads()
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    return os.getpid(), draws, settings, flags, Path.cwd(), dict(os.environ)


def warn():
    warnings.warn("a warning in a rank", stacklevel=1)


def die():
    os.kill(os.getpid(), 9)


def start_a_dataloader_worker():
    from torch.utils.data import DataLoader

    return [int(value) for value in DataLoader(list(range(3)), batch_size=None, num_workers=1)]


@pytest.mark.parametrize("size", [2, 3])
def test_groups_open_and_close_ten_times_in_the_same_processes(ranks, size):
    mean = (size - 1) / 2
    before = ranks(size, process_id)
    for steps in range(1, 11):
        assert ranks(size, train_a_little, steps) == [pytest.approx([mean * steps, mean * steps])] * size
    assert ranks(size, process_id) == before


def test_results_are_in_rank_order_and_ranks_have_the_variables_of_torchrun(ranks):
    assert ranks(3, launcher_variables) == [
        [str(rank), str(rank), "0", "3", "3", "1", "127.0.0.1"] for rank in range(3)
    ]


def test_ranks_can_be_placed_on_two_simulated_nodes(ranks):
    positions = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    expected = [[str(rank), str(local), str(node), "4", "2", "2", "127.0.0.1"] for rank, local, node in positions]
    assert ranks(4, launcher_variables, nodes=2) == expected


def test_a_single_rank_has_no_launcher_variables(ranks):
    assert ranks(1, launcher_variables) == [[None] * 7]


def test_the_traceback_of_the_failed_rank_comes_first(ranks):
    with pytest.raises(
        RankFailed,
        match=r"^rank 1: .*rank 1 failed on purpose[\s\S]*rank 1 of 2: Traceback[\s\S]*in raise_on[\s\S]*rank 0 of",
    ) as failure:
        ranks(2, raise_on, 1)
    assert next(iter(failure.value.errors)) == 1
    assert "in raise_on" in failure.value.errors[0]  # it waited at the barrier and saw that its peer had gone
    assert ranks(2, train_a_little, 1) == [pytest.approx([0.5, 0.5])] * 2


def test_the_errors_of_all_ranks_are_kept(ranks):
    with pytest.raises(RankFailed) as failure:
        ranks(3, raise_everywhere)
    assert sorted(failure.value.errors) == [0, 1, 2]
    for rank, text in failure.value.errors.items():
        assert text.endswith(f"ValueError: rank {rank} failed on purpose\n")


def test_processes_without_a_group_survive_expected_errors(ranks):
    before = ranks(2, process_id)
    assert [text.splitlines()[-1] for text in ranks.errors(2, raise_everywhere)] == [
        "ValueError: rank 0 failed on purpose",
        "ValueError: rank 1 failed on purpose",
    ]
    assert ranks(2, process_id) == before


def test_a_process_whose_group_an_error_left_open_is_reused(ranks):
    before = ranks(3, process_id)
    assert len(ranks.errors(2, raise_everywhere_in_a_group)) == 2
    assert ranks(3, process_id) == before


def test_expecting_errors_fails_if_a_rank_returns(ranks):
    with pytest.raises(AssertionError, match=r"ranks \[0\] of 1 returned, but every rank should raise"):
        ranks.errors(1, process_id)


def test_a_hang_shows_the_stack_of_the_rank_and_the_next_job_runs(ranks):
    before = ranks(2, process_id)
    with pytest.raises(
        RankFailed, match=r"rank 1 of 2: sent no answer in \d+\.\d s; its stack:[\s\S]*wait_forever_on"
    ) as failure:
        ranks(2, wait_forever_on, 1, timeout=4)
    assert list(failure.value.errors) == [1]
    after = ranks(2, process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_dead_process_is_reported_with_its_signal(ranks):
    with pytest.raises(RankFailed, match=r"rank 0 of 1: the process died \(SIGKILL\)"):
        ranks(1, die)


def test_a_group_left_open_is_a_failure(ranks):
    with pytest.raises(RankFailed, match="leave_a_group_open returned with its process group still open"):
        ranks(1, leave_a_group_open)


def test_the_state_of_a_process_is_restored_after_a_job(ranks):
    before = ranks(1, state)
    ranks(1, change_everything)
    assert ranks(1, state) == before


def test_a_job_has_the_variables_and_the_folder_of_its_test_only(ranks, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("FOR_THIS_TEST", "1")
        patch.chdir(tmp_path)
        ranks.stop()
        [(*_, folder, environment)] = ranks(1, state)
        assert (folder, environment["FOR_THIS_TEST"]) == (tmp_path, "1")
    [(*_, folder, environment)] = ranks(1, state)
    assert folder == Path.cwd()
    assert "FOR_THIS_TEST" not in environment


def test_an_interrupted_test_leaves_no_answer_for_the_next_one(ranks):
    def interrupt(*_):
        raise TimeoutError("interrupted")

    ranks(1, process_id)
    before = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR2])
    timer.start()
    try:
        with pytest.raises(TimeoutError, match="interrupted"):
            ranks(1, time.sleep, 0.6)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert ranks(1, launcher_variables) == [[None] * 7]


def test_a_warning_in_a_rank_is_an_error(ranks):
    with pytest.raises(RankFailed, match="UserWarning: a warning in a rank"):
        ranks(1, warn)


def test_a_rank_can_start_data_workers(ranks):
    assert ranks(1, start_a_dataloader_worker) == [[0, 1, 2]]


def test_a_function_that_cannot_be_pickled_raises_before_any_rank_runs(ranks):
    with pytest.raises(TypeError, match=r"<lambda> cannot be sent to another process: define it at module level"):
        ranks(2, lambda: 1)


def test_more_ranks_than_the_pool_has_is_an_error(ranks):
    with pytest.raises(ValueError, match="5 ranks requested, but the pool has 1 to 4"):
        ranks(5, process_id)
