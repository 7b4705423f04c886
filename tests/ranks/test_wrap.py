"""run.wrap: rank 0's weights on all ranks, frozen parts excluded, changes after wrapping raise."""

import io
import os
import re
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import Run
from samestep.errors import WrapError
from samestep.parallel.fsdp import find_blocks
from tests.ranks.expected import ignore_batchnorm_warning

DATA = [torch.full((4,), float(i)) for i in range(8)]


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Net(nn.Module):
    """A frozen body between two trainable layers."""

    def __init__(self, frozen=False):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.body.requires_grad_(not frozen)
        self.after = nn.Linear(4, 2)

    def forward(self, x):
        return self.after(self.body(self.before(x)))


def start_from_different_seeds(strategy):
    with Run(global_batch=4) as run:
        torch.manual_seed(run.rank)
        model = Net()
        model.body[2].running_mean.uniform_()
        built = {name: full(tensor) for name, tensor in model.state_dict().items()}
        with ignore_batchnorm_warning():
            wrapped = run.wrap(model, strategy)
        return built, {name.removeprefix("module."): full(t) for name, t in wrapped.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_starts_with_the_weights_and_buffers_of_rank_0(ranks, strategy):
    (first, begun0), (second, begun1) = ranks(2, start_from_different_seeds, strategy)
    assert not torch.equal(first["after.weight"], second["after.weight"])
    for name, tensor in first.items():
        assert torch.equal(begun0[name], tensor)
        assert torch.equal(begun1[name], tensor)


def freeze_different_weights():
    with Run(global_batch=4) as run:
        torch.manual_seed(run.rank)
        run.wrap(Net(frozen=True))


def test_frozen_weights_that_differ_raise_at_the_start(ranks):
    for text in ranks.errors(2, freeze_different_weights):
        assert "ReplicasDiffer: at the start, ranks hold different bits in 'body.0.weight'" in text


def build_different_models(kind):
    with Run(global_batch=4) as run:
        wide = 3 + run.rank if kind == "shape" else 3
        model = nn.Sequential(nn.Linear(4, wide), *([nn.Linear(wide, 1)] if kind == "more" and run.rank else []))
        run.wrap(model)


def test_ranks_that_build_different_models_raise_with_the_difference(ranks):
    first, second = ranks.errors(2, build_different_models, "shape")
    assert "WrapError: rank 0 and rank 1 built different models: ('0.weight', (3, 4), 'torch.float32') here" in first
    assert (
        "('0.weight', (4, 4), 'torch.float32') there; build the model from the same configuration on every rank"
        in first
    )
    assert "rank 1 and rank 0 built different models" in second
    for text in ranks.errors(2, build_different_models, "more"):
        assert "built different models: " in text
        last = "('1.weight', (1, 3), 'torch.float32')"
        assert (f"nothing here, {last} there" in text) or (f"{last} here, nothing there" in text)


def values_exchanged(layers):
    """How many values each exchange of run.wrap sends."""
    with Run(global_batch=4) as run:
        comm, sizes = run._comm, []
        exchange = comm.exchange
        comm.exchange = lambda operation, values: sizes.append(len(values)) or exchange(operation, values)
        run.wrap(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
        return sizes


def test_what_ranks_exchange_to_compare_models_does_not_grow_with_the_model(ranks):
    small, large = ranks(2, values_exchanged, 2), ranks(2, values_exchanged, 50)
    assert small == large
    assert max(small[0]) <= 4


def build_models_that_differ_in_layer(number):
    with Run(global_batch=4) as run:
        layers = [nn.Linear(2, 2, bias=not (run.rank == 2 and at == number)) for at in range(20)]
        run.wrap(nn.Sequential(*layers))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 7, 18])
def test_the_first_difference_between_long_models_is_named(ranks, number):
    first, _, third = ranks.errors(3, build_models_that_differ_in_layer, number)
    bias, weight = (f"('{at}.{name}', (2," for at, name in ((number, "bias"), (number + 1, "weight")))
    assert f"rank 0 and rank 2 built different models: {bias}" in first
    assert f"rank 2 and rank 0 built different models: {weight}" in third


def wrap_wrongly(**options):
    with Run(global_batch=4) as run:
        run.wrap(nn.Linear(1, 1), **options)


def single_on_two():
    wrap_wrongly(strategy="single")


def test_invalid_options_raise(ranks):
    with pytest.raises(
        WrapError, match=r"run\.wrap: strategy='dpp' is not valid; use one of 'single', 'ddp', 'fsdp', 'hybrid'"
    ):
        wrap_wrongly(strategy="dpp")
    with pytest.raises(
        WrapError, match=r"run\.wrap: unused_parameters='ignore' is not valid; use one of 'error', 'allow'"
    ):
        wrap_wrongly(unused_parameters="ignore")
    with pytest.raises(
        WrapError, match="cpu_offload=True moves sharded weights to host memory: use it with strategy='fsdp'"
    ):
        wrap_wrongly(cpu_offload=True)
    for text in ranks.errors(2, single_on_two):
        assert "strategy='single' needs one rank, got 2: use 'ddp', 'fsdp' or 'hybrid', or omit it" in text


def test_a_model_without_trainable_parameters_raises():
    with (
        Run(global_batch=4) as run,
        pytest.raises(WrapError, match="Linear has no trainable parameter: call it without"),
    ):
        run.wrap(nn.Linear(1, 1).requires_grad_(False))


def test_a_model_with_uninitialized_parameters_raises():
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    message = (
        r"Sequential has uninitialized parameters: 0\.weight, 0\.bias, 1\.weight, 1\.bias, 1\.running_mean, "
        r"1\.running_var, whose shapes follow from the first batch; call the model with one batch before run\.wrap"
    )
    with Run(global_batch=4) as run, pytest.raises(WrapError, match=message):
        run.wrap(model)
    model(torch.ones(2, 3))
    with Run(global_batch=4) as run:
        assert run.wrap(model)[0].weight.shape == (2, 3)


def train_with_frozen_body(strategy):
    with Run(global_batch=4) as run:
        model = run.wrap(Net(frozen=True), strategy)
        inner = getattr(model, "module", model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = {name: full(tensor) for name, tensor in inner.body.state_dict().items()}
        for epoch in run.shard(DATA).epochs(1):
            model.train()
            for step in epoch:
                for x in step:
                    step.mean(model(x).sum(dim=1)).backward()
                optimizer.step()
                modes = [module.training for module in inner.body.modules()]
                optimizer.zero_grad()
        moved = [n for n, tensor in inner.body.state_dict().items() if not torch.equal(full(tensor), before[n])]
        names = {id(p): name for name, p in inner.named_parameters()}
        stepped = sorted(names[id(p)] for p in optimizer.state)
        return modes, moved, [p.grad is None for p in inner.body.parameters()], stepped


@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_frozen_parts_stay_in_eval_mode_without_gradient_or_optimizer_state(ranks, size, strategy):
    for modes, moved, without_gradient, stepped in ranks(size, train_with_frozen_body, strategy):
        assert modes == [False] * 4
        assert moved == []
        assert all(without_gradient)
        assert stepped == ["after.bias", "after.weight", "before.bias", "before.weight"]


class LoRALinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def wrap_with_adapters(number):
    with redirect_stdout(io.StringIO()) as printed, Run(global_batch=4) as run:
        run.wrap(nn.Sequential(*(LoRALinear() for _ in range(number))), "ddp")
    return [line for line in printed.getvalue().splitlines() if line.startswith("strategy")]


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (4, "0.base, 1.base, 2.base, 3.base (80 parameters)"),
        (24, "24 submodules: 0.base, 1.base, 2.base, 3.base and 20 more (480 parameters)"),
    ],
)
def test_frozen_submodules_are_named_on_a_short_line(ranks, number, names):
    printed, _ = ranks(2, wrap_with_adapters, number)
    assert printed == [f"strategy: ddp (as requested); frozen and excluded: {names}"]


def one_step(run, model, call, optimizer):
    for epoch in run.shard(DATA).epochs(1):
        for step in epoch:
            for x in step:
                step.mean(call(x).sum(dim=1)).backward()
            optimizer.step()
            optimizer.zero_grad()


def stale_optimizer(strategy):
    with Run(global_batch=4) as run:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(net.parameters())
        model = run.wrap(net, strategy)
        one_step(run, model, model, optimizer)


def test_an_optimizer_built_before_sharding_raises_at_the_first_step(ranks):
    for text in ranks.errors(2, stale_optimizer, "fsdp"):
        assert (
            "WrapError: AdamW has 2 parameter(s) that no wrapped model owns: shape (2, 4) in group 0, (2,) in group 0."
            in text
        )
        assert "If it was built before run.wrap, build it after: AdamW(model.parameters(), ...)" in text
    ranks(2, stale_optimizer, "ddp")  # DDP keeps the parameters, so the optimizer is valid


def two_modules():
    with Run(global_batch=4) as run:
        model, probe = run.wrap(nn.Linear(4, 2)), nn.Linear(2, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *probe.parameters()], lr=0.1)
        one_step(run, model, lambda x: probe(model(x)), optimizer)


def test_an_optimizer_with_parameters_of_an_unwrapped_module_raises(ranks):
    for text in ranks.errors(2, two_modules):
        assert "SGD has 2 parameter(s) that no wrapped model owns: shape (1, 2) in group 0, (1,) in group 0." in text
        assert (
            "If they belong to another module, wrap that module too: its gradients are not averaged over the ranks"
            in text
        )


def change_after_wrapping(how):
    with Run(global_batch=4) as run:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].requires_grad_(how != "unfreeze")
        model = run.wrap(net)
        if how == "replace":
            net[1] = nn.Linear(4, 2)
        if how == "unfreeze":
            net[0].requires_grad_(True)
        one_step(run, model, model, torch.optim.SGD(net[0].parameters(), lr=0.1))


@pytest.mark.slow
def test_a_parameter_changed_after_wrapping_raises_at_the_first_step(ranks):
    for size in (1, 2):
        for text in ranks.errors(size, change_after_wrapping, "replace"):
            assert (
                "WrapError: parameter '1.weight' was replaced or added after run.wrap, so its gradient is not" in text
            )
            assert "change the model first, then wrap it, then build the optimizer" in text
    for text in ranks.errors(2, change_after_wrapping, "unfreeze"):
        assert "WrapError: parameter '0.weight' was frozen when the model was wrapped and is trainable now" in text
        assert (
            "unfreeze it before run.wrap; to train more parameters from some epoch on, end this Run there and continue"
            in text
        )


def bypass():
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Linear(4, 2))
        one_step(run, model, model.module, torch.optim.SGD(model.parameters(), lr=0.1))


def test_calling_the_inner_module_in_a_step_raises(ranks):
    for text in ranks.errors(2, bypass):
        assert (
            "WrapError: Linear was called without its wrapper in a training step (model.module(x)?), so its gradients"
            in text
        )
        assert "call the model that run.wrap returned" in text


def skip_backward():
    """Skip the backward pass in every other step: gathered weights are not mistaken for new parameters."""
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard(DATA).epochs(2):
            for step in epoch:
                for x in step:
                    loss = step.mean(model(x).sum(dim=1))
                    if step.number % 2:
                        loss.backward()
                if step.number % 2:
                    optimizer.step()
                optimizer.zero_grad()
                run._lifecycle.context.models[0].check_unchanged()
        return float(full(model[0].weight).sum())


def test_a_sharded_model_may_skip_the_backward_pass(ranks):
    first, second = ranks(2, skip_backward)
    assert first == second


class Part(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.feed = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
        self.inner = inner

    def forward(self, x):
        return self.feed(x)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.levels = nn.ModuleList(nn.ModuleList([Part(), Part()]) for _ in range(2))
        self.alone = nn.ModuleList([Part()])
        self.head = nn.Sequential(nn.LayerNorm(2), nn.GELU(), nn.Linear(2, 1))


def names(model, blocks):
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(block)] for block in blocks]


def test_blocks_are_the_members_of_outermost_containers():
    model = Stacked()
    assert names(model, find_blocks(model, ())) == [
        *("levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"),
        *("alone.0.feed.0", "alone.0.feed.2"),
        *("head.0", "head.2"),
    ]
    assert names(model.head, find_blocks(model.head, ())) == ["0", "2"]


def test_blocks_by_class_come_inner_before_outer():
    model = nn.Sequential(Part(inner=Part()), nn.Linear(2, 2))
    assert names(model, find_blocks(model, (Part,))) == ["0.inner", "0"]
    with pytest.raises(
        WrapError, match="Sequential has no submodule of class Conv2d: pass the classes that repeat in it as blocks="
    ):
        find_blocks(model, (nn.Conv2d,))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))


def wrap_scaled(strategy):
    with Run(global_batch=4) as run:
        run.wrap(Scaled(), strategy)


def test_a_scalar_parameter_with_fsdp_raises_on_one_rank_too(ranks):
    message = r"WrapError: parameter 'scale' is a scalar.*torch\.ones\(1\).*or use strategy='ddp'"
    for error in [*ranks.errors(1, wrap_scaled, "fsdp"), *ranks.errors(2, wrap_scaled, "zero2")]:
        assert re.search(message, error), error
    ranks(2, wrap_scaled, "ddp")


def train_tied(strategy):
    torch.manual_seed(0)
    with Run(global_batch=4) as run:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        model = run.wrap(net, strategy)
        one_step(run, model, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [full(parameter).tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_blocks_with_tied_weights_are_sharded_together(ranks, strategy):
    (alone,) = ranks(1, train_tied, None)
    for trained in ranks(2, train_tied, strategy):
        for weights, expected in zip(trained, alone, strict=True):
            assert torch.allclose(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=1e-6)


def shard_by_class(offload):
    with Run(global_batch=4) as run:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), Part2(), Part2(), nn.Linear(4, 2))
        model = run.wrap(net, "fsdp", blocks=(Part2,), cpu_offload=offload)
        one_step(run, model, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return full(model[1].layer.weight), full(model[0].weight)


class Part2(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).tanh()


@pytest.mark.parametrize("offload", [False, True])
def test_blocks_by_class_and_offload_change_nothing(ranks, offload):
    expected = ranks(1, by_hand)[0]
    for trained in ranks(2, shard_by_class, offload):
        for tensor, expected_tensor in zip(trained, expected, strict=True):
            assert torch.allclose(tensor, expected_tensor, atol=1e-6)


def by_hand():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Part2(), Part2(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in (torch.stack(DATA[:4]), torch.stack(DATA[4:])):
        net(batch).sum(dim=1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net[1].layer.weight.detach(), net[0].weight.detach()


def hybrid_on_one_node():
    wrap_wrongly(strategy="hybrid")


def test_hybrid_on_one_node_raises(ranks):
    for text in ranks.errors(2, hybrid_on_one_node):
        assert (
            "strategy='hybrid' shards inside a node and replicates between nodes, which 2 rank(s) on 1 node(s) do not"
            in text
        )
        assert "use strategy='fsdp'" in text


def shard_in_two_runs(file):
    """Shard a model in a run next to groups of the script, then in one of its own: the norms of the weights."""
    rank, norms = int(os.environ["RANK"]), []
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    for _ in range(2):
        dist.new_group()  # the group of the first run has a name that does not exist in the second
    for _ in range(2):
        with Run(global_batch=2) as run:
            torch.manual_seed(0)
            model = run.wrap(nn.Linear(4, 4, bias=False), "fsdp")
            norms.append(float(torch.linalg.vector_norm(model.weight.detach()).full_tensor()))
        if dist.is_initialized():
            dist.destroy_process_group()
    return norms


def test_a_second_run_shards_in_its_own_group(ranks, tmp_path):
    for first, second in ranks(2, shard_in_two_runs, str(tmp_path / "store")):
        assert first == second


def groups_of_hybrid():
    """Backend and timeout of each group of a hybrid mesh, before and after the first step."""
    with Run(global_batch=4, start_timeout=60, step_timeout=30) as run:
        model = run.wrap(nn.Linear(4, 4), "hybrid")
        mesh = model.weight.device_mesh
        groups = [mesh.get_group(dimension) for dimension in range(2)]
        found = [(dist.get_backend(group), dist.get_process_group_ranks(group)) for group in groups]
        times = [_timeouts(groups)]
        for epoch in run.shard(DATA[:4]).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).sum(1)).backward()
        return found, [*times, _timeouts(groups)]


def _timeouts(groups):
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_groups_of_a_hybrid_mesh_have_the_backend_and_the_timeouts_of_the_run(ranks):
    for rank, (groups, times) in enumerate(ranks(4, groups_of_hybrid, nodes=2)):
        row, column = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        assert groups == [("gloo", column), ("gloo", row)]
        assert times == [[60, 60], [30, 30]]
