"""A run that plans by itself: detected hardware, a traced step, one choice for all ranks, the same weights."""

import json
import os
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.distributed.device import MemoryShare, memory_shares
from samestep.environment.world import World
from samestep.parallel.precision import choose_precision, detect_support
from samestep.parallel.wrap import WrapOptions
from samestep.planner import trace
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.plan import make_plan
from samestep.planner.traced_model import profile_weights
from samestep.training import auto_plan

RNG = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(96, 20, 64, generator=RNG), torch.randint(0, 10, (96,), generator=RNG))
EXAMPLE = (torch.zeros(8, 20, 64), torch.zeros(8, dtype=torch.long))
EXAMPLE_OF_FOUR = torch.zeros(4, 4)
FP32 = choose_precision([detect_support(torch.device("cpu"), "fp32", False)])
OVERHEAD = 300 * 2**20  # bytes that a plan counts for a process on the CPU


class Block(nn.Module):
    """A residual block, wide enough that activations are larger than weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(gelu(self.up(x)))


class Net(nn.Module):
    """Blocks over a sequence, then a classifier."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean(dim=1))


@contextmanager
def free_memory(free):
    """Pretend that each rank has `free` bytes in addition to the overhead of its process; None: as detected."""
    before = auto_plan._free_memory, auto_plan.CUDA_MARGIN
    if free is not None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks of a node share the memory of its CPU
        auto_plan._free_memory, auto_plan.CUDA_MARGIN = lambda device: float(ranks * (OVERHEAD + free)), 0.0
    try:
        yield
    finally:
        auto_plan._free_memory, auto_plan.CUDA_MARGIN = before


def unsharded(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


class Selecting(Net):
    """Has an output whose size depends on values."""

    def forward(self, x):
        scores = super().forward(x)
        return scores + scores[scores > 0].sum()


def train(example, free, strategy=None, model=Net):
    """Weights, rows of the largest micro-batch, the plans of the summary, and the log."""
    with free_memory(free), Run(global_batch=32, seed=0, folder="out") as run:
        model = run.wrap(model(), strategy, example=example)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        largest = 0
        for epoch in run.shard(DATA, shuffle=True, num_workers=0).epochs(2):
            for step in epoch:
                for x, y in step:
                    largest = max(largest, len(x))
                    step.mean(cross_entropy(model(x), y, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([unsharded(p).flatten() for p in model.parameters()])
        run.print("end")
    summary = json.loads((run.folder / "summary.json").read_text()) if run.is_main else None
    return weights, largest, summary and summary["plan"], (run.folder / "log.txt").read_text() if run.is_main else ""


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_prints_follows_saves_and_evaluates_its_plan(ranks, size):
    (_, largest, (plan,), log), *_ = ranks(size, train, EXAMPLE, None)
    name = {1: "single", 2: "ddp"}[size]
    assert re.search(
        rf"plan: {name}, global batch 32 as {size} x {32 // size} x 1 \(\d+\.\d MiB of .* free per device", log
    )
    assert re.search(r"the simplest of the fastest among \d+ that fit\)", log)
    assert re.search(r"plan: [\d.]+ m?s per step estimated, [\d.]+ m?s measured \([+-]\d+%\)", log)
    assert largest == 32 // size
    assert plan["chosen"]["strategy"] == name
    assert plan["compared"].keys() == {"planned_seconds", "actual_seconds"}
    assert plan["compared"]["actual_seconds"] > 0
    if size == 2:
        assert "strategy: ddp (as planned)" in log


@pytest.mark.slow
def test_less_memory_means_a_smaller_micro_batch_and_the_same_weights(ranks):
    plain = ranks(1, train, None, None)[0][0]
    for size in (1, 2):
        memory = ranks(size, train, EXAMPLE, None)[0][2][0]["chosen"]["memory"]
        by_rank = ranks(size, train, EXAMPLE, memory["total"] - memory["overhead"] - memory["activations"] // 2)
        largest = {rows for _, rows, *_ in by_rank}
        assert len(largest) == 1
        assert 1 <= largest.pop() < 32 // size
        assert by_rank[0][2][0]["chosen"]["fits"]
        for weights, *_ in by_rank:
            assert torch.allclose(weights, plain, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_run_in_which_nothing_fits_says_so_and_trains_anyway(ranks):
    (_, largest, (plan,), log), *_ = ranks(1, train, EXAMPLE, 1000)
    assert "plan: nothing fits by this estimate, single" in log
    assert "does not fit: " in log
    assert largest == 1
    assert not plan["chosen"]["fits"]


@pytest.mark.slow
def test_a_given_strategy_is_kept_and_the_rest_is_planned(ranks):
    (_, _, (plan,), log), *_ = ranks(2, train, EXAMPLE, None, "fsdp")
    assert plan["chosen"]["strategy"] == "fsdp"
    assert "strategy: fsdp (as requested)" in log


def test_without_an_example_nothing_is_traced_on_the_cpu(ranks):
    (_, _, plans, log), *_ = ranks(2, train, None, None)
    assert plans == []
    assert "plan:" not in log


def wrap_with(strategy, optimizer, example=EXAMPLE):
    with Run(global_batch=4) as run:
        run.wrap(Net(), strategy, example=example, optimizer=optimizer)


@pytest.mark.slow
def test_invalid_options_raise_on_every_rank(ranks):
    for text in ranks.errors(2, wrap_with, "dpp", "AdamW"):
        assert "WrapError: run.wrap: strategy='dpp' is not valid; use one of" in text
    for text in ranks.errors(2, wrap_with, None, "Adamw"):
        assert "PlanError: optimizer='Adamw' is not in torch.optim. Use one of" in text
    for example, kind in (([0.5], "list"), (torch.zeros(0, 8), "Tensor"), (torch.tensor(1.0), "Tensor")):
        for text in ranks.errors(2, wrap_with, None, "AdamW", example):
            assert f"WrapError: run.wrap got a {kind} without samples as example=: pass a batch as the model" in text
    for text in ranks.errors(2, wrap_with, None, "AdamW", torch.zeros(4, 3)):
        assert "Net cannot be called with the example batch (" in text
        assert "Return the batch in the form that the model takes, " in text


def test_a_plan_says_that_it_is_an_upper_bound(ranks):
    ((_, _, (plan,), log),) = ranks(1, train, EXAMPLE, None, None, Selecting)
    caveat = (
        "traced without memory; a mask selects elements by values, which a trace does not have (nonzero(), or a mask "
        "as an index): all elements count, so memory and time are upper bounds"
    )
    assert f"that fit; {caveat})" in log
    assert plan["model"]["method"] == caveat


class ReadingValues(Net):
    """Reads a number in its forward pass."""

    def forward(self, x):
        scores = super().forward(x)
        return scores * (2 if scores.sum().item() > 0 else 1)


def train_with_limit(seconds):
    before, trace.MEASURE_SECONDS = trace.MEASURE_SECONDS, seconds
    try:
        return train(EXAMPLE, None, None, ReadingValues)
    finally:
        trace.MEASURE_SECONDS = before


def test_a_model_that_cannot_be_traced_is_measured_for_the_plan(ranks):
    ((_, _, (plan,), log),) = ranks(1, train_with_limit, 60.0)
    assert "that fit; measured with real micro-batches of 2 and 4 samples on the CPU, since a step needs values" in log
    assert plan["model"]["activations"]["per_sample"] > 0


def test_a_run_whose_model_takes_too_long_to_measure_trains_without_a_plan_and_says_why(ranks):
    (_, _, plans, log), _ = ranks(2, train_with_limit, 0.0)
    assert "plan: none. A step of ReadingValues needs values, which a trace does not have (.item()" in log
    assert plans == []


@pytest.mark.parametrize(("width", "strategy"), [(1_000, "ddp"), (30_000, "ddp"), (40_000, "fsdp")])
def test_without_an_example_a_model_is_sharded_if_its_state_needs_half_of_a_gpu(width, strategy):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    plan = make_plan(parse_cluster_spec("h100:4", 1), profile_weights(model), 256, "bf16", 0.5)
    fitting = [each for each in plan.candidates if each.fits and each.layout.ranks == 4]
    assert min(fitting, key=auto_plan._complexity).layout.strategy == strategy
    assert profile_weights(model).persistent == 16 * sum(p.numel() for p in model.parameters())


def test_planned_and_actual_memory_are_compared_if_the_device_reports_it():
    compared = {"planned_bytes": 2**30, "actual_bytes": 2**30 + 2**27, "planned_seconds": 0.5, "actual_seconds": 0.4}
    assert auto_plan.format_comparison(compared) == (
        "plan: 1.0 GiB estimated, 1.1 GiB used (+12%); 500 ms per step estimated, 400 ms measured (-20%)"
    )
    assert auto_plan.format_comparison({"planned_seconds": 0.5}) == ""


def memory_share(free):
    with free_memory(None), Run(global_batch=8) as run:
        return min(memory_shares(run._comm, "detecting free memory", run.device, free))


def test_ranks_on_one_device_share_its_free_memory(ranks):
    assert ranks(1, memory_share, 6e9) == [MemoryShare(6 * 10**9, 1)]
    assert ranks(2, memory_share, 6e9) == 2 * [MemoryShare(3 * 10**9, 2)]
    assert ranks(2, memory_share, 6e9, nodes=2) == 2 * [MemoryShare(6 * 10**9, 1)]


def context(world, device, global_batch):
    """What planning needs of a RunContext."""
    return SimpleNamespace(
        world=world,
        device=torch.device(device),
        acceleration=SimpleNamespace(precision=FP32),
        config=SimpleNamespace(global_batch=global_batch),
        comm=SimpleNamespace(alone=False),
    )


@pytest.mark.parametrize("sharing", [2, 8])
def test_ranks_that_share_a_gpu_plan_with_their_part_of_its_memory_and_speed(monkeypatch, sharing):
    monkeypatch.setattr(
        "samestep.planner.cluster_discovery.detect_cluster", lambda nodes: parse_cluster_spec("h200:1", nodes)
    )
    world, full = World(size=sharing, local_size=sharing), parse_cluster_spec("h200:1", 1)
    share = MemoryShare(full.device.memory // sharing, sharing)
    found = auto_plan._cluster(world, share)
    assert found.device.memory == found.device.memory_free == share.free
    assert found.device.peak_flops["bfloat16"] == full.device.peak_flops["bfloat16"] / sharing
    assert found.host_bandwidth == full.host_bandwidth / sharing
    plan = auto_plan._plan_on_rank0(context(world, "cuda", 16), Net(), WrapOptions(), None, "AdamW", share)
    assert plan.message.startswith("plan: ddp"), plan.message


def test_on_gpus_a_model_that_takes_too_long_to_measure_is_planned_by_its_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    monkeypatch.setattr(
        "samestep.planner.cluster_discovery.detect_cluster", lambda nodes: parse_cluster_spec("h200:2", nodes)
    )
    monkeypatch.setattr(trace, "MEASURE_SECONDS", 0.0)
    world, share = World(size=2, local_size=2), MemoryShare(10**11, 1)
    plan = auto_plan._plan_on_rank0(context(world, "cuda", 16), ReadingValues(), WrapOptions(), EXAMPLE, "AdamW", share)
    assert plan.message.startswith("plan: ddp (weights, gradients and Adam's two moments need ")
    assert "half of it is left to activations; A step of ReadingValues needs values, which a trace" in plan.message
    assert not plan.traced
    assert plan.micro_batch is None


def test_nodes_with_different_numbers_of_ranks_can_be_planned_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    world, share = World(rank=0, size=3, local_size=2, nodes=2), MemoryShare(2**33, 2)
    found = auto_plan._cluster(world, share)
    assert (found.devices, found.devices_per_node, found.nodes) == (3, 1, 3)
    plan = auto_plan._plan_on_rank0(
        context(world, "cpu", 12), nn.Linear(4, 4), WrapOptions(), EXAMPLE_OF_FOUR, "AdamW", share
    )
    assert plan.chosen.layout.ranks == 3
