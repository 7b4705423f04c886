"""What `samestep verify` costs: its time beside that of the script on two ranks, for steps of about 2 seconds in all.

    python benchmarks/verify_cost.py [--rounds 3]

The script trains a small transformer with DDP. Both take turns; the printed ratio compares the time that verify spends
in all of its worlds with the time that the script spends in its steps.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from samestep.verify import Interpreters, verify

SCRIPT = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randint(0, 200, (480, 64), generator=generator))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)


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
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        measured = [measure(script) for _ in range(rounds)]
    steps, total, started = (statistics.median(values) for values in zip(*measured, strict=True))
    print(f"steps of the script on 2 ranks: {steps:.2f} s")
    print(f"samestep verify: {total:.1f} s, of which {started:.1f} s start Python and torch")
    print(f"worlds of verify relative to the steps: {(total - started) / steps:.2f} x")


def measure(script: Path) -> tuple[float, float, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    output = subprocess.run(launch, capture_output=True, text=True, check=True, cwd=script.parent).stdout
    steps = float(output.split("steps ")[1].split()[0])
    start = time.perf_counter()
    with Interpreters() as interpreters:
        interpreters.wait_until_ready()
        started = time.perf_counter() - start
        verdict = verify(script, interpreters=interpreters)
    assert not verdict.findings, verdict.findings
    return steps, time.perf_counter() - start, started


if __name__ == "__main__":
    main()
