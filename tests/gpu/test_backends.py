"""The backend of ranks on real GPUs, and runs inside process groups that a script created with "nccl" or "gloo".

Several ranks on one GPU need NCCL 2.30 or newer in the process (LD_PRELOAD) and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.environment.gpus import identify_gpu, nccl_version
from samestep.environment.world import shares_gpus
from tests.launch.launched import IMPORT_PATH


@pytest.fixture
def shared_gpu(monkeypatch):
    if nccl_version() < (2, 30) and torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks on one GPU need NCCL 2.30 or newer, this is {nccl_version()}: set LD_PRELOAD")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def test_a_gpu_has_the_same_name_in_every_process():
    name = identify_gpu(0)
    code = "from samestep.environment.gpus import identify_gpu; print(identify_gpu(0))"
    options = {"capture_output": True, "text": True, "timeout": 300, "env": {**os.environ, **IMPORT_PATH}}
    other = subprocess.run([sys.executable, "-c", code], check=True, **options)
    assert name.startswith(("GPU-", "MIG-"))
    assert other.stdout.strip() == name
    assert nccl_version() >= (2, 0)


def train(backends):
    """Train in a process group that the script created; None: samestep creates it."""
    warnings.filterwarnings("ignore", ".*ranks share 1 GPU.*")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # fp32 was requested explicitly
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    warnings.filterwarnings("ignore", "(?s).*device.id")  # torch's advice about groups without one
    if backends is not None:
        dist.init_process_group(backends)
    with Run(global_batch=4, precision="fp32") as run:
        model = run.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(16.0).reshape(8, 2) / 8)
        for epoch in run.shard(data, shuffle=False, num_workers=0).epochs(1):
            for step in epoch:
                for (rows,) in step:
                    step.mean(model(rows).square().mean(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        on_cpu, on_gpu = (run.all_reduce(torch.ones(2, device=each), "sum").tolist() for each in ("cpu", "cuda"))
        rows = run.gather(torch.tensor([run.rank])).tolist()
        result = run._comm.backend, on_cpu, on_gpu, rows, [value.tolist() for value in model.parameters()]
    if backends is not None:
        alive = torch.ones(1, device="cuda")
        dist.all_reduce(alive)
        assert alive.item() == 2
        dist.destroy_process_group()
    return result


def test_ranks_that_share_a_gpu_use_gloo_unless_the_variable_allows_nccl(ranks, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs: each rank has one")
    assert not shares_gpus()
    assert [each[0] for each in ranks(2, train, None, timeout=300)] == ["gloo", "gloo"]


@pytest.mark.parametrize("backends", [None, "nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_a_run_uses_nccl_in_any_process_group(ranks, shared_gpu, backends):
    results = ranks(2, train, backends, timeout=300)
    for backend, on_cpu, on_gpu, rows, weights in results:
        assert (backend, on_cpu, on_gpu, rows) == ("nccl", [2, 2], [2, 2], [0, 1])
        assert weights == results[0][-1]
