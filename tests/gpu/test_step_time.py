"""Estimated and actual step time on the available GPU."""

import json
import statistics

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from samestep.cli.main import main
from samestep.planner.calibration import apply_calibration, calibrate
from samestep.planner.cluster_discovery import detect_cluster
from samestep.planner.plan import make_plan
from samestep.planner.step_timing import time_on_gpu
from samestep.planner.trace import trace_model
from tests.gpu.test_memory import convolutions, transformer

GPU = "cuda"
WARM, TIMED = 4, 10


@pytest.fixture(scope="module")
def cluster():
    if not torch.cuda.is_available():  # this fixture runs before the one that skips tests
        pytest.skip("torch sees no CUDA device here: run tests/gpu on a machine with one")
    return apply_calibration(detect_cluster(1), calibrate(torch.device(GPU, 0)))


def small_layers(samples: int):
    """Layers so small that the GPU waits for the host."""
    layers = [layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(samples, 64), torch.zeros(samples, dtype=torch.long))


def real_seconds(workload, samples: int) -> float:
    with torch.device(GPU):
        model, (inputs, labels) = workload(samples)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM + TIMED + 1)]
    for mark in marks[:-1]:
        mark.record()
        with torch.autocast(GPU, torch.bfloat16):
            loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks[WARM:], marks[WARM + 1 :], strict=False))


@pytest.mark.parametrize(
    ("workload", "samples"),
    [(transformer, 64), (convolutions, 64), (small_layers, 16)],
    ids=lambda each: str(each)[:24],
)
def test_the_estimated_step_time_is_within_20_percent(cluster, workload, samples):
    def build():
        return workload(samples)

    profile = trace_model(build, precision="bf16")
    profile = time_on_gpu(profile, build, cluster, samples, "bf16", channels_last=False)
    found = {each.layout.name: each for each in make_plan(cluster, profile, samples, "bf16").candidates}["single"]
    assert found.micro_batch == samples
    real = real_seconds(workload, samples)
    assert found.time.total == pytest.approx(real, rel=0.2)


def test_the_command_times_operations_on_the_local_gpu(tmp_path, monkeypatch, capsys):
    (tmp_path / "lab.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(1024, 1000), (torch.zeros(8, 1024), torch.zeros(8, dtype=torch.long))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", "lab:build", "--global-batch", "64", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["method"].endswith("operations timed on this device")
