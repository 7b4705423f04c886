"""A run that plans by itself: live hardware, a traced step, one choice for all ranks, the same weights."""

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
from samestep.distributed.device import MemoryShare, smallest_memory_share
from samestep.environment.world import World
from samestep.parallel.precision import choose_precision, detect_support
from samestep.parallel.wrap import WrapOptions
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.model_parts import profile_weights
from samestep.planner.plan import make_plan
from samestep.training import auto_plan as planning
from samestep.training.auto_plan import PlanSite, tell

LUCK = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(96, 20, 64, generator=LUCK), torch.randint(0, 10, (96,), generator=LUCK))
EXAMPLE = (torch.zeros(8, 20, 64), torch.zeros(8, dtype=torch.long))
EXAMPLE_OF_FOUR = torch.zeros(4, 4)
FP32 = choose_precision([detect_support(torch.device("cpu"), "fp32", False)])
OVERHEAD = 300 * 2**20  # that a plan counts for a process on the CPU


class Block(nn.Module):
    """A residual block, wide enough that activations outweigh weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(gelu(self.up(x)))


class Net(nn.Module):
    """Blocks over a sequence, then one score a class."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean(dim=1))


@contextmanager
def room(free):
    """A device with so many bytes for a model beside what each process takes; None: as it is."""
    before = planning._free, planning.CUDA_MARGIN
    if free is not None:
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of a node share what is free on its CPU
        planning._free, planning.CUDA_MARGIN = lambda device: float(sharing * (OVERHEAD + free)), 0.0
    try:
        yield
    finally:
        planning._free, planning.CUDA_MARGIN = before


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train(example, free, strategy=None):
    """Weights, rows of the largest micro-batch and the plan in the summary."""
    with room(free), Run(global_batch=32, seed=0, folder="out") as run:
        model = run.wrap(Net(), strategy, example=example)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        most = 0
        for epoch in run.shard(DATA, shuffle=True, num_workers=0).epochs(2):
            for step in epoch:
                for x, y in step:
                    most = max(most, len(x))
                    step.mean(cross_entropy(model(x), y, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([whole(p).flatten() for p in model.parameters()])
        run.print("end")
    summary = json.loads((run.folder / "summary.json").read_text()) if run.is_main else None
    return weights, most, summary and summary["plan"], (run.folder / "log.txt").read_text() if run.is_main else ""


@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_is_said_followed_kept_and_compared_with_what_came(ranks, size):
    (_, most, (made,), log), *_ = ranks(size, train, EXAMPLE, None)
    name = {1: "single", 2: "ddp"}[size]
    assert re.search(
        rf"plan: {name}, global batch 32 as {size} x {32 // size} x 1 \(\d+\.\d MiB of .* free on a dev", log
    )
    assert "that fit the simplest that is about the fastest)" in log
    assert re.search(r"plan: [\d.]+ m?s a step were estimated and [\d.]+ m?s came \([+-]\d+%\)", log)
    assert most == 32 // size
    assert made["chosen"]["strategy"] == name
    assert made["compared"].keys() == {"planned_seconds", "actual_seconds"}
    assert made["compared"]["actual_seconds"] > 0
    if size == 2:
        assert "strategy: ddp (as planned)" in log


def test_a_tight_device_gets_a_smaller_micro_batch_and_learns_the_same(ranks):
    plain = ranks(1, train, None, None)[0][0]
    for size in (1, 2):
        needs = ranks(size, train, EXAMPLE, None)[0][2][0]["chosen"]["memory"]
        by_rank = ranks(size, train, EXAMPLE, needs["total"] - needs["overhead"] - needs["activations"] // 2)
        mosts = {most for _, most, *_ in by_rank}
        assert len(mosts) == 1
        assert 1 <= mosts.pop() < 32 // size
        assert by_rank[0][2][0]["chosen"]["fits"]
        for weights, *_ in by_rank:
            assert torch.allclose(weights, plain, rtol=0, atol=1e-6)


def test_where_nothing_fits_it_is_said_and_tried_all_the_same(ranks):
    (_, most, (made,), log), *_ = ranks(1, train, EXAMPLE, 1000)
    assert "plan: nothing fits by this estimate, single" in log
    assert "does not fit: " in log
    assert most == 1
    assert not made["chosen"]["fits"]


def test_a_named_strategy_is_kept_and_the_rest_is_planned(ranks):
    (_, _, (made,), log), *_ = ranks(2, train, EXAMPLE, None, "fsdp")
    assert made["chosen"]["strategy"] == "fsdp"
    assert "strategy: fsdp (as requested)" in log


def test_without_an_example_nothing_is_traced_on_the_cpu(ranks):
    (_, _, made, log), *_ = ranks(2, train, None, None)
    assert made == []
    assert "plan:" not in log


def wrap_badly(strategy, optimizer, example=EXAMPLE):
    with Run(global_batch=4) as run:
        run.wrap(Net(), strategy, example=example, optimizer=optimizer)


def test_a_wrong_wish_is_told_on_every_rank(ranks):
    for text in ranks.errors(2, wrap_badly, "dpp", "AdamW"):
        assert "WrapError: run.wrap does not know strategy='dpp'" in text
    for text in ranks.errors(2, wrap_badly, None, "Adamw"):
        assert "PlanError: optimizer='Adamw' is not in torch.optim. Use one of" in text
    for example, kind in (([0.5], "list"), (torch.zeros(0, 8), "Tensor"), (torch.tensor(1.0), "Tensor")):
        for text in ranks.errors(2, wrap_badly, None, "AdamW", example):
            assert f"WrapError: run.wrap got a {kind} without samples as example=: give a batch as the model" in text
    for text in ranks.errors(2, wrap_badly, None, "AdamW", torch.zeros(4, 3)):
        assert "Net cannot be called with the example batch (" in text
        assert "Return the batch in the form that the model takes, " in text


@pytest.mark.parametrize(("width", "strategy"), [(1_000, "ddp"), (30_000, "ddp"), (40_000, "fsdp")])
def test_by_weights_alone_a_model_is_sharded_where_its_state_takes_half_of_a_gpu(width, strategy):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    made = make_plan(parse_cluster_spec("h100:4", 1), profile_weights(model), 256, "bf16", 0.5)
    ours = [each for each in made.candidates if each.fits and each.layout.ranks == 4]
    assert min(ours, key=planning._simplicity).layout.strategy == strategy
    assert profile_weights(model).persistent == 16 * sum(p.numel() for p in model.parameters())


def test_memory_is_compared_where_the_device_tells_it():
    told = tell({"planned_bytes": 2**30, "actual_bytes": 2**30 + 2**27, "planned_seconds": 0.5, "actual_seconds": 0.4})
    assert (
        told
        == "plan: 1.0 GiB were estimated and 1.1 GiB came (+12%); 500 ms a step were estimated and 400 ms came (-20%)"
    )
    assert tell({"planned_seconds": 0.5}) == ""


def free_of_a_rank(free):
    with room(None), Run(global_batch=8) as run:
        return smallest_memory_share(run._comm, "looking for room", run.device, free)


def test_ranks_of_one_device_share_what_is_free_there(ranks):
    assert ranks(1, free_of_a_rank, 6e9) == [MemoryShare(6 * 10**9, 1)]
    assert ranks(2, free_of_a_rank, 6e9) == 2 * [MemoryShare(3 * 10**9, 2)]
    assert ranks(2, free_of_a_rank, 6e9, nodes=2) == 2 * [MemoryShare(6 * 10**9, 1)]


@pytest.mark.parametrize("sharing", [2, 8])
def test_ranks_that_share_a_gpu_have_a_part_of_its_memory_and_leave_free_a_part_of_that(monkeypatch, sharing):
    monkeypatch.setattr(
        "samestep.planner.cluster_discovery.detect_cluster", lambda nodes: parse_cluster_spec("h200:1", nodes)
    )
    world, whole = World(size=sharing, local_size=sharing), parse_cluster_spec("h200:1", 1)
    share = MemoryShare(whole.device.memory // sharing, sharing)
    found = planning._machines(world, share)
    assert found.device.memory == found.device.memory_free == share.free
    assert found.device.peak_flops["bfloat16"] == whole.device.peak_flops["bfloat16"] / sharing
    assert found.host_bandwidth == whole.host_bandwidth / sharing
    site = PlanSite(
        SimpleNamespace(world=world), torch.device("cuda"), FP32, 16, lambda function, *given: function(*given)
    )
    made = planning._decide(site, Net(), WrapOptions(), None, "AdamW", share)
    assert made.told.startswith("plan: ddp"), made.told


def test_nodes_with_unlike_numbers_of_ranks_can_be_planned_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    world = World(rank=0, size=3, local_size=2, nodes=2)
    found = planning._machines(world, MemoryShare(2**33, 2))
    assert (found.devices, found.devices_per_node, found.nodes) == (3, 1, 3)
    site = PlanSite(
        SimpleNamespace(world=world), torch.device("cpu"), FP32, 12, lambda function, *given: function(*given)
    )
    made = planning._decide(site, nn.Linear(4, 4), WrapOptions(), EXAMPLE_OF_FOUR, "AdamW", MemoryShare(2**33, 2))
    assert made.chosen.layout.ranks == 3
