"""Private torch API that samestep uses: these tests fail when torch changes it."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from samestep import Run
from samestep.torch_private import (
    after_this_backward,
    class_labels,
    collective_counts,
    dispatch_in_graphs,
    ignore_in_ddp,
    is_compiled,
    matrix_product_shape,
    nccl_waits,
    no_buffer_broadcast,
    set_group_timeout,
    vmap_randomness,
)
from tests.launch.launched import wait_for


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
