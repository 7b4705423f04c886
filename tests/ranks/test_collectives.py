"""Collectives: reductions, once, agreement, and errors that name the missing rank."""

import re
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from samestep import Run
from samestep.distributed import process_group
from samestep.distributed.device import RankDevice
from samestep.environment.world import read_world
from samestep.errors import CommunicationError, WorldError
from samestep.training import lifecycle
from tests.launch.launched import wait_for
from tests.warm import RankFailed


def reduce_uneven():
    with Run(global_batch=8) as run:
        mine = [torch.full((2 * run.rank + 1,), float(run.rank))]  # rank r holds 2r+1 values, all r
        return run.mean(mine), run.sum(mine), run.max(mine), run.mean(iter(mine))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mean_gives_every_element_the_same_weight(ranks, size):
    values = [float(r) for r in range(size) for _ in range(2 * r + 1)]
    for mean, total, top, again in ranks(size, reduce_uneven):
        assert mean == again == sum(values) / len(values)
        assert total == sum(values)
        assert top == size - 1


def reduce_integers():
    with Run(global_batch=8) as run:
        big = (1 << 60) + run.rank
        whole = run.all_reduce(torch.tensor([1 + run.rank, 2]), "mean")
        return run.sum(big), run.max(big), run.mean(1 + run.rank), whole.tolist(), str(whole.dtype)


def test_integers_are_summed_exactly(ranks):
    for total, top, mean, whole, dtype in ranks(2, reduce_integers):
        assert total == (1 << 61) + 1
        assert top == (1 << 60) + 1
        assert mean == 1.5
        assert whole == [1.5, 2.0]
        assert dtype == "torch.float64"


def reduce_with_one_empty_rank():
    with Run(global_batch=8) as run:
        values = [] if run.rank == 1 else [True, False, True]
        return run.mean(values), run.sum(values), run.max(values)


def test_a_rank_without_values_does_not_count(ranks):
    for mean, total, top in ranks(2, reduce_with_one_empty_rank):
        assert (mean, total, top) == (2 / 3, 2, 1)


def reduce_by_name():
    with Run(global_batch=8) as run:
        batches = [] if run.rank == 1 else [{"loss": torch.tensor([1.0, 2.0]), "right": [True]}, {"right": [False] * 3}]
        return run.means(iter(batches))


def test_several_means_come_from_one_pass_even_if_a_rank_has_no_batch(ranks):
    for size in (1, 2):
        assert ranks(size, reduce_by_name) == [{"loss": 1.5, "right": 0.25}] * size


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "run.means got no values on any rank, so the mean is undefined: is the dataset empty?"),
        ([{"loss": []}], "run.means got no values for 'loss' on any rank"),
        (
            [torch.ones(2)],
            "run.means needs a dictionary of values per batch, got Tensor: pass `({'loss': losses",
        ),
    ],
)
def test_means_without_values_or_names_raise(batches, text):
    with Run(global_batch=8) as run, pytest.raises(CommunicationError, match=re.escape(text)):
        run.means(batches)


def reduce_tensors():
    with Run(global_batch=8) as run:
        mine = torch.tensor([1.0, 2.0]) * (run.rank + 1)
        kept = mine.clone()
        answers = [run.all_reduce(mine, op).tolist() for op in ("sum", "mean", "max", "min")]
        weighted = run.all_reduce(mine, "mean", weight=3.0 if run.rank == 0 else 1.0).tolist()
        assert torch.equal(mine, kept)
        return answers, weighted


def test_all_reduce_returns_a_new_tensor_for_each_op(ranks):
    for answers, weighted in ranks(2, reduce_tensors):
        assert answers == [[3, 6], [1.5, 3], [2, 4], [1, 2]]
        assert weighted == [1.25, 2.5]


def test_empty_and_invalid_values_raise():
    with Run(global_batch=8) as run:
        with pytest.raises(CommunicationError, match=r"run\.mean got no values on any rank"):
            run.mean([])
        with pytest.raises(CommunicationError, match=r"run\.max got no values on any rank"):
            run.max([])
        with pytest.raises(
            CommunicationError, match="cannot read numbers from NoneType: pass a number, a tensor, or an iterable"
        ):
            run.mean(None)
        with pytest.raises(CommunicationError, match="an iterable of str: its items must be numbers or tensors"):
            run.mean(["a"])
        with pytest.raises(CommunicationError, match="complex tensor"):
            run.mean(torch.tensor([1j]))
        with pytest.raises(
            CommunicationError,
            match=r"run\.all_reduce: op='median' is not valid; use one of 'sum', 'mean', 'max', 'min'",
        ):
            run.all_reduce(torch.ones(1), "median")
        with pytest.raises(CommunicationError, match="weight= is valid with op='mean' only"):
            run.all_reduce(torch.ones(1), "sum", weight=2.0)
        with pytest.raises(CommunicationError, match="got weight=0 on every rank"):
            run.all_reduce(torch.ones(1), "mean", weight=0.0)


def test_max_returns_nan_if_any_value_is_nan():
    with Run(global_batch=8) as run:
        assert run.max([float("nan"), 1.0]) != run.max([float("nan"), 1.0])
        assert run.max([1.0, float("nan")]) != run.max([1.0, float("nan")])


def once_value(per):
    with Run(global_batch=8) as run:
        calls = []
        value = run.once(lambda: calls.append(1) or {"from": run.rank, "blob": b"x" * 9_000_000}, per=per)
        return value["from"], len(value["blob"]), len(calls)


def test_once_runs_on_rank_0_and_all_ranks_get_its_value(ranks):
    assert ranks(3, once_value, "run") == [(0, 9_000_000, 1), (0, 9_000_000, 0), (0, 9_000_000, 0)]


def test_once_per_node_runs_on_the_first_rank_of_each_node(ranks):
    given = ranks(4, once_value, "node", nodes=2)
    assert [(source, calls) for source, _, calls in given] == [(0, 1), (0, 0), (2, 1), (2, 0)]


def download_missing():
    raise FileNotFoundError("no such shard: part-7")


def once_raises(per="run"):
    with Run(global_batch=8) as run:
        run.once(download_missing, per=per)


def test_an_exception_in_once_is_raised_on_every_rank(ranks):
    for text in ranks.errors(2, once_raises):
        assert "FileNotFoundError: no such shard: part-7" in text
        assert "raised on rank 0 in run.once(download_missing), for every rank:" in text
        assert 'raise FileNotFoundError("no such shard: part-7")' in text


class Unportable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raise_unpicklable():
    raise Unportable(1, 2)


def once_raises_unpicklable():
    with Run(global_batch=8) as run:
        run.once(raise_unpicklable)


def test_an_error_that_cannot_be_pickled_arrives_as_text(ranks):
    for text in ranks.errors(2, once_raises_unpicklable):
        assert "samestep.errors.OnceFailed: raised on rank 0 in run.once(raise_unpicklable)" in text
        assert "Unportable: 1 and 2" in text


def fail_on_second_node(rank):
    if rank() == 1:
        raise ValueError("disk of node 1 is full")


def once_fails_on_one_node():
    with Run(global_batch=8) as run:
        run.once(fail_on_second_node, lambda: run.rank, per="node")


def test_a_failure_on_one_node_reaches_all_nodes(ranks):
    for text in ranks.errors(2, once_fails_on_one_node, nodes=2):
        assert "ValueError: disk of node 1 is full" in text
        assert "raised on rank 1 in run.once(fail_on_second_node)" in text


def once_under_condition():
    with Run(global_batch=8, start_timeout=120, step_timeout=120) as run:
        if run.is_main:
            run.once(int)
        run.barrier()


def test_once_under_a_rank_condition_raises_on_every_rank(ranks):
    began = time.monotonic()
    first, second = ranks.errors(2, once_under_condition)
    assert "CommunicationError: rank 0 called run.once(int) at test_collectives.py:" in first
    assert "while rank 1 called run.barrier at test_collectives.py:" in first
    assert "every rank must make the same calls in the same order (is one of them under `if run.is_main:`?)" in first
    assert "rank 1 called run.barrier at test_collectives.py:" in second
    assert time.monotonic() - began < 60  # far less than the timeout of 120 s


def mean_under_condition():
    with Run(global_batch=8, step_timeout=30) as run:
        if run.is_main:
            run.mean(1.0)
        run.mean(2.0)


def test_the_same_collective_from_different_lines_raises(ranks):
    for text in ranks.errors(2, mean_under_condition):
        assert "called run.mean at test_collectives.py:" in text


def skip_last_call():
    with Run(global_batch=8, start_timeout=120, step_timeout=120) as run:
        if run.is_main:
            run.agree(False)


def test_a_rank_that_skips_a_collective_is_named(ranks):
    first, second = ranks.errors(2, skip_last_call)
    assert "rank 0 called run.agree" in first
    assert "rank 1 called" in second


def nested_once():
    with Run(global_batch=8) as run:
        run.once(lambda: run.once(int))


@pytest.mark.parametrize("size", [1, 2])
def test_nested_once_raises(ranks, size):
    for text in ranks.errors(size, nested_once):
        assert "CommunicationError: run.once(int) at test_collectives.py:" in text
        assert (
            "was called inside run.once(<lambda>): only one rank runs that function, so the others never reach" in text
        )


def slow_rank(missed):
    with Run(global_batch=8, start_timeout=2, step_timeout=2) as run:
        if run.rank == 1:
            wait_for(missed.exists, 120)
        try:
            run.barrier()
        finally:
            missed.touch()


@pytest.mark.slow
def test_a_rank_that_times_out_is_named_with_its_last_call(ranks, tmp_path):
    first = ranks.errors(2, slow_rank, tmp_path / "missed")[0]
    assert "RankMissing: rank 0 waits in run.barrier at test_collectives.py:" in first
    assert "rank 1 was last in" in first
    assert "raise the timeout with Run(start_timeout=...)" in first


def failing_rank():
    with Run(global_batch=8, start_timeout=120, step_timeout=120) as run:
        if run.rank == 1:
            raise ValueError("failure on rank 1")
        run.barrier()


@pytest.mark.slow
def test_the_failure_of_a_peer_is_reported_within_seconds(ranks):
    began = time.monotonic()
    first, second = ranks.errors(2, failing_rank)
    assert "ValueError: failure on rank 1" in second
    assert "rank 0 waits in run.barrier" in first
    assert "rank 1 failed: ValueError: failure on rank 1" in first
    assert time.monotonic() - began < 60


def slow_once():
    with Run(global_batch=8, start_timeout=20, step_timeout=1) as run:
        run._comm.start_steps()
        return run.once(lambda: time.sleep(2) or "done")


@pytest.mark.slow
def test_once_may_take_longer_than_a_step(ranks):
    assert ranks(2, slow_once) == ["done", "done"]


def agree_and_wait():
    with Run(global_batch=8) as run:
        run.barrier()
        return run.agree(run.rank == 1), run.agree(False), run.is_main, run.is_node_main, run.rank, run.size


def test_agree_is_true_on_all_if_true_on_any(ranks):
    assert ranks(2, agree_and_wait) == [(True, False, True, True, 0, 2), (True, False, False, False, 1, 2)]
    assert ranks(1, agree_and_wait) == [(False, False, True, True, 0, 1)]


def seeds():
    with Run(global_batch=8, seed=7) as run:
        shared = torch.rand(2).tolist()
        run.wrap(torch.nn.Linear(2, 1))
        return shared, torch.rand(2).tolist()


def test_draws_outside_of_a_step_are_equal_on_all_ranks_before_and_after_wrapping(ranks):
    first, second = ranks(2, seeds)
    assert first == second
    assert first[0] != first[1]
    assert ranks(1, seeds)[0] == first


def different_configs():
    import os

    with Run(global_batch=8 + int(os.environ["RANK"])):
        pass


def test_ranks_with_different_configs_do_not_start(ranks):
    for text in ranks.errors(2, different_configs):
        assert "CommunicationError: rank " in text
        assert "Run(global_batch=8, seed=0, ledger=False)" in text
        assert "Run(global_batch=9, seed=0, ledger=False)" in text


def start_and_close():
    run = Run(global_batch=8)
    run.start()
    value = run.sum(1)
    run.close()
    return value


def test_start_and_close_work_without_with(ranks):
    assert ranks(2, start_and_close) == [2, 2]
    with pytest.raises(CommunicationError, match="this run is not started: use `with Run"):
        Run(global_batch=8).wrap(torch.nn.Linear(1, 1))
    run = Run(global_batch=8).start()
    with pytest.raises(CommunicationError, match="already started"):
        run.start()
    run.close()


def use_existing_group(backends):
    dist.init_process_group(backends)
    with Run(global_batch=8) as run:
        total, rows = run.sum(run.rank + 1), run.gather(torch.tensor([run.rank])).tolist()
        reduced = run.all_reduce(torch.ones(2), "sum").tolist()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return total, rows, reduced, alive


# the second group has no backend for CPU tensors, like one that a script creates with "nccl"
@pytest.mark.parametrize("backends", ["gloo", "cuda:gloo"])
def test_an_existing_process_group_is_used_and_kept(ranks, backends):
    assert ranks(2, use_existing_group, backends) == [(3, [0, 1], [2, 2], True)] * 2


def open_store_beside_a_group(addresses):
    """The timeout of the store that a Run uses in the group of a script, if MASTER_ADDR is each of these."""
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        world = replace(read_world(), address=addresses[rank])
        store = process_group.store_beside_group(world, dist.group.WORLD, 2.5)
        dist.barrier()
        return store.timeout.total_seconds()
    except WorldError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def test_the_store_beside_a_group_has_the_start_timeout(ranks):
    assert ranks(2, open_store_beside_a_group, ["127.0.0.1"] * 2) == [2.5, 2.5]


@pytest.mark.slow
def test_all_ranks_raise_if_rank_0_cannot_open_the_store_beside_a_group(ranks):
    for error in ranks(2, open_store_beside_a_group, ["no.such.host.invalid", "127.0.0.1"]):
        assert "rank 0 cannot open a store at " in error
        assert (
            "for a Run in the process group of the script: set MASTER_ADDR to an address of rank 0's machine" in error
        )


def connect_to_a_host_that_is_not_rank_0(listening):
    dist.init_process_group("gloo")
    world = replace(read_world(), address="127.0.0.1" if dist.get_rank() == 0 else "no.such.host.invalid")
    try:
        return process_group.store_beside_group(world, dist.group.WORLD, 2.5).timeout.total_seconds()
    except WorldError as error:
        return str(error)
    finally:
        (listening / str(dist.get_rank())).touch()
        wait_for(lambda: len(list(listening.iterdir())) == 2, 120)
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_that_does_not_reach_the_store_beside_a_group_names_host_and_port(ranks, tmp_path):
    first, second = ranks(2, connect_to_a_host_that_is_not_rank_0, tmp_path)
    assert first == 2.5
    assert re.match(
        r"rank 1 cannot connect to the store of rank 0 at no\.such\.host\.invalid:[1-9]\d+ within 2\.5 s: a Run in the "
        r"process group of the script uses a free port of rank 0, so check that MASTER_ADDR is right and that no "
        r"firewall blocks its ports, or remove dist\.init_process_group \(",
        second,
    )


def start_in_a_group_without_open_files():
    dist.init_process_group("gloo")
    before, process_group.allow_open_files = process_group.allow_open_files, lambda needed: f"{needed} files"
    try:
        with Run(global_batch=8):
            return "started"
    except WorldError as error:
        return str(error)
    finally:
        process_group.allow_open_files = before
        dist.destroy_process_group()


def test_the_limit_of_open_files_is_checked_in_an_existing_group_too(ranks):
    for rank, error in enumerate(ranks(2, start_in_a_group_without_open_files)):
        assert re.match(rf"rank {rank} cannot connect 2 ranks: \d+ files", error)


def leave_with_exit():
    with Run(global_batch=8) as run:
        run.barrier()
        raise SystemExit(0)


def exit_with_success():
    try:
        leave_with_exit()
    except SystemExit:
        return "left"


def test_sys_exit_with_success_closes_the_run(ranks):
    assert ranks(2, exit_with_success) == ["left", "left"]


def exit_at_different_times():
    """Rank 0 exits, rank 1 ends its block later than rank 0 asks where it is, and rank 2 exits last."""
    try:
        with Run(global_batch=8) as run:
            time.sleep(1.5 * run.rank)
            if run.rank != 1:
                raise SystemExit(0)
    except SystemExit:
        return "exit"
    return "end"


@pytest.mark.slow
def test_a_rank_that_exits_waits_for_ranks_that_are_busy(ranks):
    assert ranks(3, exit_at_different_times) == ["exit", "end", "exit"]


def exit_on_rank_1(where):
    with Run(global_batch=8, step_timeout=1000, start_timeout=1000) as run:
        model = run.wrap(torch.nn.Linear(2, 1), "ddp")
        if run.rank == 1:
            raise SystemExit(0)
        if where == "backward":
            model(torch.ones(1, 2)).sum().backward()
        run.barrier()


@pytest.mark.parametrize(
    ("where", "others"),
    [
        ("backward", r"rank 0 .* is now at test_collectives.py:\d+ in backward"),
        ("barrier", r"rank 0 waits in run.barrier at test_collectives.py:\d+"),
    ],
    ids=["backward", "barrier"],
)
@pytest.mark.slow
def test_a_rank_that_exits_while_others_wait_for_it_says_so(ranks, where, others):
    with pytest.raises(RankFailed) as caught:
        ranks(2, exit_on_rank_1, where)
    errors = caught.value.errors
    called = r"rank 1 called sys.exit\(0\) at test_collectives.py:\d+ inside of `with Run`, but "
    assert re.search(f"CommunicationError: {called}{others}: call sys.exit on every rank in the same step", errors[1])
    assert re.search(f"rank 1 failed: CommunicationError: {called}", errors[0])


def run_on_simulated_gpus(gpus, fields):
    """A run whose ranks report these GPUs, while they compute on the CPU; returns the backend and the warnings."""
    before = lifecycle.describe_rank
    lifecycle.describe_rank = lambda world, *rest: RankDevice(world.rank, gpus[world.rank], **fields)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Run(global_batch=8) as run:
                total, backend = run.sum(run.rank + 1), run._comm.backend
        return total, backend, [str(each.message) for each in caught]
    finally:
        lifecycle.describe_rank = before


def test_ranks_that_share_a_gpu_agree_on_gloo_and_rank_0_says_why(ranks):
    first, second = ranks(2, run_on_simulated_gpus, ["GPU-a", "GPU-a"], {"nccl": [2, 28, 9]})
    assert first[:2] == second[:2] == (3, "gloo")
    assert "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, and NCCL 2.28.9 does not allow it" in first[2][0]


def test_a_backend_that_the_gpus_do_not_allow_is_an_error_on_all_ranks(ranks):
    fields = {"nccl": [2, 28, 9], "requested": "nccl"}
    for text in ranks.errors(2, run_on_simulated_gpus, ["GPU-a", "GPU-a"], fields):
        assert "WorldError: backend='nccl' needs one GPU per rank, but 2 ranks share 1 GPU(s)" in text


def test_ranks_with_and_without_a_gpu_are_an_error_at_the_start(ranks):
    for text in ranks.errors(2, run_on_simulated_gpus, ["GPU-a", ""], {"requested": "gloo"}):
        assert "WorldError: a GPU is visible to 1 of 2 ranks, but not to rank 1" in text


def start_with_nccl(gpus):
    """A run with backend="nccl" whose ranks report these GPUs, while torch sees none."""
    before = lifecycle.describe_rank
    lifecycle.describe_rank = lambda world, *rest: RankDevice(world.rank, gpus[world.rank], requested="nccl")
    try:
        with Run(global_batch=8, backend="nccl", start_timeout=1000):
            pass
    finally:
        lifecycle.describe_rank = before


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (["", ""], "backend='nccl' needs a CUDA device and torch sees none on any of the 2 ranks: omit backend to use"),
        (["GPU-a", ""], "a GPU is visible to 1 of 2 ranks, but not to rank 1"),
    ],
)
def test_nccl_on_a_rank_without_a_gpu_is_an_error_on_all_ranks(ranks, gpus, message):
    for text in ranks.errors(2, start_with_nccl, gpus):
        assert f"WorldError: {message}" in text


def destroy_groups(ranks_that_do, then):
    """Destroy the process groups inside of a run, and continue with a collective, or with nothing."""
    with Run(global_batch=8, step_timeout=1000, start_timeout=1000) as run:
        run.barrier()
        if run.rank in ranks_that_do:
            dist.destroy_process_group()
        if then == "mean":
            run.mean([1.0])
        elif then == "torch":
            dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("then", "operation"), [("mean", r"run\.mean at test_collectives"), ("end", r".* at test_collectives")]
)
def test_a_run_whose_process_groups_the_script_has_destroyed_says_so(ranks, then, operation):
    message = (
        rf"{operation}\.py:\d+ was called after dist\.destroy_process_group\(\): the run needs the process groups unt"
    )
    for text in ranks.errors(2, destroy_groups, (0, 1), then):
        assert re.search(rf"CommunicationError: {message}", text)
    first, second = ranks.errors(2, destroy_groups, (1,), then)
    assert re.search(rf"CommunicationError: {message}", second)
    assert re.search(rf"RankMissing: .* but rank 1 failed: CommunicationError: {message}", first)


def test_an_error_of_torch_after_its_groups_are_destroyed_gets_a_note(ranks):
    for text in ranks.errors(2, destroy_groups, (0, 1), "torch"):
        assert "ValueError: Default process group has not been initialized" in text
        assert (
            "the script has called dist.destroy_process_group() inside of `with Run`, which needs the process" in text
        )


def start_while_one_rank_fails(failing):
    def describe_or_fail(world, *rest):
        if world.rank == failing:
            raise OSError("the driver does not answer")
        return before(world, *rest)

    before, lifecycle.describe_rank = lifecycle.describe_rank, describe_or_fail
    try:
        with Run(global_batch=8):
            pass
    finally:
        lifecycle.describe_rank = before


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_the_backend_is_chosen_is_named_by_the_other(ranks, failing):
    errors = ranks.errors(2, start_while_one_rank_fails, failing)
    assert "OSError: the driver does not answer" in errors[failing]
    assert f"RankMissing: rank {1 - failing} waits in Run.start at test_collectives.py:" in errors[1 - failing]
    assert f", but rank {failing} failed: OSError: the driver does not answer" in errors[1 - failing]


def pauses_in_once():
    """How long a rank that waits for run.once sleeps between two requests to the store."""
    before, pauses, main = time.sleep, [], threading.main_thread()

    def sleep(seconds):
        if threading.current_thread() is main:
            pauses.append(seconds)
        before(seconds)

    with Run(global_batch=8) as run:
        time.sleep = sleep
        try:
            run.once(lambda: before(1.5))
        finally:
            time.sleep = before
    return pauses


@pytest.mark.slow
def test_a_rank_leaves_once_soon_after_its_end(ranks):
    # a peer that goes on to the next collective raises if this one still waits in once at two checks, from 1 s on
    _, pauses = ranks(2, pauses_in_once)
    assert max(pauses) == 0.25
