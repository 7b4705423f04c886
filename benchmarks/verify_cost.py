"""What `samestep verify` costs: the steps of all its worlds beside those of the script, for steps of 1 to 2 seconds.

    python benchmarks/verify_cost.py [--rounds 3]

The script trains a small transformer with DDP. In every round it runs without verify on 2 ranks and on 1 rank with the
global batch, as torchrun starts it, and then under verify, which runs it in the same two worlds. The script measures
its loop over the steps itself, also under verify. Everything else that verify does is start-up: Python, torch, process
groups, and reading the traces at the end.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from samestep.verify import Interpreters, verify

SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randint(0, 200, (480, 64), generator=generator))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=int(sys.argv[1]) if len(sys.argv) > 1 else 8, sampler=sampler)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 200)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


torch.manual_seed(0)
model = DDP(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = time.perf_counter()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (tokens,) in loader:
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("steps", time.perf_counter() - start, flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        with contextlib.chdir(folder):  # verify mirrors the current folder, which takes longer the more files it has
            measured = [measure(script) for _ in range(rounds)]
    two, one, worlds, total, started = (statistics.median(values) for values in zip(*measured, strict=True))
    print(f"steps of the script: {two:.2f} s on 2 ranks, {one:.2f} s on 1 rank with the global batch")
    print(f"samestep verify: {total:.1f} s, of which {started:.1f} s start Python and torch")
    print(f"steps in the worlds of verify: {worlds:.2f} s, {worlds / two:.2f} x those on 2 ranks, ", end="")
    print(f"{worlds / (two + one):.2f} x those of the same worlds without verify")
    print(f"with the start of the worlds and the comparison: {(total - started) / two:.2f} x those on 2 ranks")


def measure(script: Path) -> tuple[float, float, float, float, float]:
    two, one = run(script, 2, 8), run(script, 1, 16)
    start = time.perf_counter()
    with Interpreters() as interpreters, tempfile.TemporaryDirectory() as folder:
        interpreters.wait_until_ready()
        started = time.perf_counter() - start
        verdict = verify(script, interpreters=interpreters, keep=folder)
        total = time.perf_counter() - start
        logs = list(Path(folder).glob("*/rank-0.log"))
        assert len(logs) == len(verdict.worlds) == 2, logs
        worlds = sum(read_seconds(log.read_text()) for log in logs)
    assert not verdict.findings, verdict.findings
    return two, one, worlds, total, started


def run(script: Path, ranks: int, batch: int) -> float:
    """Seconds of the steps of the script, without verify."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script)]
    # torch sometimes aborts a process at its very end ("terminate called"), after the script has printed its time
    ended = subprocess.run([*launch, str(batch)], capture_output=True, text=True, check=False, cwd=script.parent)
    return read_seconds(ended.stdout)


def read_seconds(output: str) -> float:
    return float(output.split("steps ")[1].split()[0])


if __name__ == "__main__":
    main()
