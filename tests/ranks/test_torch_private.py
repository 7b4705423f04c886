"""Private torch API that samestep uses: these tests fail when torch changes it."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from samestep import Run
from samestep.hang import rank_probe
from samestep.torch_private import (
    after_this_backward,
    around_reduction,
    class_labels,
    collective_counts,
    dispatch_in_graphs,
    ignore_in_ddp,
    is_compiled,
    is_entered,
    matrix_product_shape,
    nccl_waits,
    no_buffer_broadcast,
    set_group_timeout,
    vmap_randomness,
)
from tests.launch.launched import wait_for
from tests.warm import free_port


def time_out(timed_out):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    set_group_timeout(1.0, dist.group.WORLD)
    waited = 0.0
    if dist.get_rank() == 1:
        wait_for(timed_out.exists, 35)
    else:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            waited = time.monotonic() - began
        timed_out.touch()
    dist.destroy_process_group()
    return waited


def test_the_timeout_of_a_group_can_be_changed_after_its_start(ranks, tmp_path):
    assert 0.9 < ranks(2, time_out, tmp_path / "timed out")[0] < 30  # and not 60


def count_collectives():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=45))
    before = collective_counts("gloo")
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=group)
    after = collective_counts("gloo")
    assert collective_counts("nccl") == {}
    assert nccl_waits() is None  # this torch has no NCCL, or it has no group
    dist.destroy_process_group()
    return before, after, collective_counts("gloo")


def test_the_collectives_of_each_group_are_counted(ranks):
    for before, after, destroyed in ranks(2, count_collectives):
        assert [timeout for _, timeout in before.values()] == [60, 45]
        assert [after[name][0] - count for name, (count, _) in before.items()] == [2, 1]
        assert destroyed == {}


class DestroyedGroup:
    """Raises as a group does that another thread destroys."""

    @property
    def _device_types(self):
        raise RuntimeError("Could not retrieve the process group")


def test_a_group_that_is_destroyed_while_it_is_counted_is_left_out(monkeypatch):
    monkeypatch.setitem(distributed_c10d._world.pg_map, DestroyedGroup(), ("gloo", None))
    assert collective_counts("gloo") == {}


def wrap_with_ignored():
    with Run(global_batch=2) as run:
        torch.manual_seed(run.rank)
        model = torch.nn.ModuleDict({"frozen": torch.nn.Linear(1, 1), "trained": torch.nn.Linear(1, 1)})
        model["frozen"].requires_grad_(False)
        ignore_in_ddp(model, ["frozen.weight", "frozen.bias"])
        DistributedDataParallel(model, **no_buffer_broadcast())
        return [p.item() for p in model.parameters()]


def test_parameters_can_be_excluded_from_ddp(ranks):
    first, second = ranks(2, wrap_with_ignored)
    assert first[:2] != second[:2]
    assert first[2:] == second[2:]


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("rank", torch.zeros(1))

    def forward(self, x):
        return x * self.weight


def forward_with_different_buffers():
    with Run(global_batch=2) as run:
        model = DistributedDataParallel(Counter(), **no_buffer_broadcast())
        model.module.rank.fill_(run.rank)
        model(torch.ones(1)).sum().backward()
        model(torch.ones(1))
        return model.module.rank.item()


def test_the_forward_pass_of_ddp_can_skip_the_buffer_broadcast(ranks):
    assert ranks(2, forward_with_different_buffers) == [0.0, 1.0]


def timeouts():
    with Run(global_batch=2, start_timeout=60, step_timeout=2) as run:
        before = run._comm.timeout
        data = torch.utils.data.TensorDataset(torch.ones(4))
        for epoch in run.shard(data).epochs(1):
            for step in epoch:
                for _ in step:
                    pass
        return before, run._comm.timeout


def test_start_timeout_applies_until_the_first_step(ranks):
    assert ranks(2, timeouts) == [(60, 2), (60, 2)]


def fail():
    try:
        with Run(global_batch=2):
            raise ValueError("no")
    except ValueError:
        standing = dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    return standing


def test_a_group_is_not_destroyed_after_an_exception(ranks):
    assert ranks(2, fail) == [True, True]


def test_the_shape_of_a_matrix_product_is_known_from_its_graph():
    x, y = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    assert matrix_product_shape((x @ y.T).grad_fn) == (4, 5)
    assert matrix_product_shape(torch.cdist(x, y).grad_fn) == (4, 5)
    assert matrix_product_shape((x[None] @ y.T[None]).grad_fn) in (None, (4, 5))  # torch may compute it with mm
    assert matrix_product_shape((x[:3] @ x[:3]).sum(dim=1).grad_fn) is None
    batches = torch.bmm(x.expand(2, 4, 3), y.T.expand(2, 3, 5))
    assert matrix_product_shape(batches.grad_fn) is None
    assert matrix_product_shape(torch.bmm(x[None], y.T[None]).grad_fn) == (4, 5)
    assert matrix_product_shape(torch.bmm(x[None], y.detach().T[None]).grad_fn) is None  # an operand is not kept


def test_the_labels_of_a_cross_entropy_are_found_in_the_graph():
    labels = torch.tensor([2, 0, 1])
    losses = torch.nn.functional.cross_entropy(torch.zeros(3, 4, requires_grad=True), labels, reduction="none")
    assert torch.equal(class_labels(losses.grad_fn), labels)
    assert class_labels((losses + 1).grad_fn) is None


def compiled_modules():
    plain, in_place = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    in_place.compile(backend="eager")
    return [is_compiled(module) for module in (plain, in_place, torch.compile(plain, backend="eager"))]


def randomness_in_vmap(randomness):
    seen = [vmap_randomness()]

    def record(x):
        seen.append(vmap_randomness())
        return x

    torch.vmap(torch.func.grad(record), randomness=randomness)(torch.ones(3))
    torch.func.grad(record)(torch.ones(()))
    return seen


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_the_randomness_of_vmap_is_known_inside_of_it(ranks, randomness):
    assert ranks(1, randomness_in_vmap, randomness) == [[None, randomness, None]]


def test_a_compiled_module_is_recognized(ranks):
    assert ranks(1, compiled_modules) == [[False, True, True]]


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def draw_all(x):
    return torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 5) + torch.normal(x, 1.0)


def seen_while_compiled():
    dispatch_in_graphs([torch.rand_like, torch.randn_like, torch.randint_like, torch.normal])
    with SeenFunctions() as mode:
        torch.compile(draw_all, backend="eager", fullgraph=True)(torch.ones(3))
    return {"rand_like", "randn_like", "randint_like", "normal"} & {*mode.seen}


def test_a_mode_sees_draws_in_compiled_code(ranks):
    assert ranks(1, seen_while_compiled) == [{"rand_like", "randn_like", "randint_like", "normal"}]


def gradient_after_backward(strategy):
    """The gradient that a function called after the backward pass sees, and the one that the script sees."""
    seen = []
    with Run(global_batch=2) as run:
        model = run.wrap(torch.nn.Linear(1, 2, bias=False), strategy)
        (weight,) = model.parameters()
        for epoch in run.shard([torch.tensor([1.0]), torch.tensor([3.0])]).epochs(1):
            for step in epoch:
                for x in step:
                    output = model(x)
                    output.register_hook(lambda _: after_this_backward(lambda: seen.append(part(weight.grad))))
                    step.mean(output.sum(1)).backward()
        return seen, part(weight.grad)


def part(gradient):
    return getattr(gradient, "to_local", gradient.detach)().flatten().tolist()


@pytest.mark.parametrize(("strategy", "held"), [("ddp", 2), ("fsdp", 1)])
def test_a_function_called_after_the_backward_pass_sees_reduced_gradients(ranks, strategy, held):
    for seen, after in ranks(2, gradient_after_backward, strategy):
        assert seen == [after] == [[2.0] * held]


def start_backward(before, after, _):
    around_reduction(before, after)


def wait_for_gradients(folder, strategy):
    """Rank 1 begins its backward pass when rank 0 has ended its own and waits; returns what rank 0 sees after that."""
    seen, file = [], folder / "waiting"
    with Run(global_batch=2) as run:
        model = run.wrap(torch.nn.Linear(1, 2, bias=False), strategy)
        (weight,) = model.parameters()
        for epoch in run.shard([torch.tensor([1.0]), torch.tensor([3.0])]).epochs(1):
            for step in epoch:
                for x in step:
                    loss = step.mean(model(x).sum(1))
                    if run.rank == 0:
                        loss.register_hook(partial(start_backward, file.touch, lambda: seen.append(part(weight.grad))))
                    since = time.monotonic()
                    while run.rank == 1 and not file.exists():
                        assert time.monotonic() - since < 120, "rank 0 waits before it says so"
                        time.sleep(0.01)
                    loss.backward()
        return seen


def test_a_function_is_called_before_ddp_waits_for_the_gradients_of_other_ranks(ranks, tmp_path):
    seen, _ = ranks(2, wait_for_gradients, tmp_path, "ddp")
    assert seen == [[2.0, 2.0]]


SLOW_MODULES = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
TWO_RANKS = f"""
import os, sys
from samestep import Run
from samestep.hang import rank_probe
before = {{name for name in {SLOW_MODULES} if name in sys.modules}}
child = os.fork()
os.environ.update(RANK="01"[child == 0], LOCAL_RANK="01"[child == 0], WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
from torch import nn
with Run(global_batch=2) as run:
    started = {{name for name in {SLOW_MODULES} if name in sys.modules}}
    model = run.wrap(nn.Linear(1, 1), "ddp")  # torch itself imports the first two here, with Dynamo
    wrapped = "torch.distributed.checkpoint" in sys.modules
assert (before, started, wrapped) == (set(), set(), False), (before, started, wrapped)
sys.exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_run_with_ddp_imports_neither_fsdp_nor_torch_distributed_checkpoint(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", TWO_RANKS]
    process = subprocess.run(
        command, cwd=tmp_path, env=os.environ | address, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def record_collectives():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=45))
    module, world = torch._C._distributed_c10d, getattr(distributed_c10d, rank_probe.WORLD)
    missing = [name for name in rank_probe.WORLD_FIELDS if not hasattr(world, name)]
    missing += [name for name in rank_probe.GROUP_METHODS if not hasattr(group, name)]
    backend = group._get_backend(torch.device("cpu"))
    missing += [name for name in rank_probe.BACKEND_METHODS if not hasattr(backend, name)]
    watch = rank_probe._CollectiveWatch()
    dist.all_reduce(torch.ones(2, 3), group=group)
    dist.all_reduce(torch.ones(5, dtype=torch.float64))
    dist.barrier()
    wait_for(lambda: not any(each["is_pending"] for each in watch.list(None)), 120)  # gloo's thread notes it later
    progress, collectives = watch.progress(None), watch.list(None)
    dist.destroy_process_group()
    return missing, hasattr(module, rank_probe.RECORDERS["gloo"]), progress, collectives[-3:]


def test_the_probe_reads_the_collectives_from_the_flight_recorder(ranks):
    for missing, has_recorder, progress, collectives in ranks(2, record_collectives):
        assert (missing, has_recorder) == ([], True)
        assert progress["calls"] >= 3
        first, second, third = collectives
        assert (first["name"], first["shapes"], first["dtypes"]) == ("all_reduce", [[2, 3]], ["Float"])
        assert (first["timeout"], first["ranks"], first["backend"]) == (45, [0, 1], "gloo")
        assert (second["shapes"], second["dtypes"], second["timeout"]) == ([[5]], ["Double"], 60)
        assert (third["name"], third["number"] - second["number"]) == ("barrier", 1)
        assert any(file == __file__ and name == "record_collectives" for file, _, name in third["stack"])


def test_the_recorder_of_nccl_is_there_in_torch_with_nccl():
    assert hasattr(torch._C._distributed_c10d, rank_probe.RECORDERS["nccl"]) == dist.is_nccl_available()


def test_an_entered_mode_is_known():
    outer, inner = TorchFunctionMode(), TorchFunctionMode()
    with outer:
        assert (is_entered(outer), is_entered(inner)) == (True, False)
    assert not is_entered(outer)
