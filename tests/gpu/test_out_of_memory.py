"""A full GPU in the first steps: samestep halves the micro-batch, and the weights stay the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Run

fraction = float(sys.argv[1])
torch.cuda.set_per_process_memory_fraction(fraction)
with Run(global_batch=64, seed=0, precision="fp32") as run:
    model = run.wrap(nn.Sequential(nn.Linear(64, 1 << 20), nn.GELU(), nn.Linear(1 << 20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    for epoch in run.shard(TensorDataset(rows), shuffle=True, num_workers=0).epochs(1):
        for step in epoch:
            for (x,) in step:
                step.mean(model(x).square().squeeze(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model[2].weight.detach().cpu(), sys.argv[2])
"""


def train(folder: Path, gigabytes: float, name: str) -> str:
    """Run the script with a memory limit; returns the output of the launcher and the run."""
    fraction = gigabytes * 2**30 / torch.cuda.get_device_properties(0).total_memory
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", "1", "train.py", str(fraction), name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_full_gpu_halves_the_micro_batch_and_gives_the_same_weights(tmp_path):
    output = train(tmp_path, 0.9, "small.pt")  # 0.52 GiB of weights and gradients, at least 8 MiB per row
    assert "out of memory in the first steps: restarting all ranks with half the micro-batch" in output
    assert "which ran out of memory; the global batch of 64 and the training result stay the same" in output
    assert "with half the micro-batch" not in train(tmp_path, 20, "large.pt")
    small, large = (torch.load(tmp_path / name) for name in ("small.pt", "large.pt"))
    assert torch.allclose(small, large, rtol=0, atol=1e-6)
