"""One rank compared with two and three over NCCL on one GPU: the largest difference of the weights.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/nccl_parity.py

NCCL 2.30 and newer accepts several ranks per GPU with that variable; each rank runs as a separate node. The model has
dropout and attention dropout, its inputs get noise, its loss is contrastive over all ranks, and everything is float64.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from samestep import Run


def network() -> nn.Module:
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    first = nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.3), nn.Unflatten(1, (4, 8))
    return nn.Sequential(*first, attention, nn.Flatten(1), nn.Linear(32, 8))


def train(strategy) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(58, 6))
    with Run(global_batch=20, seed=3, precision="fp64", folder=tempfile.mkdtemp()) as run:
        model = run.wrap(network(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in run.shard(data, shuffle=True).epochs(2):
            for step in epoch:
                for (x,) in step:
                    both = model(torch.cat([x + 0.1 * torch.randn_like(x), x]))
                    first, second = normalize(both, dim=1).chunk(2)
                    logits = first @ run.gather(second).T / 0.5
                    step.mean(cross_entropy(logits, step.rows, reduction="none")).backward()
                run.log({"norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0)})
                optimizer.step()
                optimizer.zero_grad()
        state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).cpu() for name, v in state.items()}


def start(ranks, file) -> None:
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + ranks)}
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(file)],
            env={**os.environ, **common, **node, "RANK": str(rank), "GROUP_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    codes = [process.wait(300) for process in started]
    if any(codes):
        sys.exit(f"training on {ranks} ranks failed")


def main() -> None:
    if len(sys.argv) > 1:
        strategies = (None,) if os.environ["WORLD_SIZE"] == "1" else ("ddp", "fsdp")
        found = {strategy: train(strategy) for strategy in strategies}
        if os.environ["RANK"] == "0":
            torch.save(found, sys.argv[1])
        return
    folder = Path(tempfile.mkdtemp())
    for ranks in (1, 2, 3):
        start(ranks, folder / f"{ranks}.pt")
    one = torch.load(folder / "1.pt")[None]
    for ranks in (2, 3):
        for strategy, weights in torch.load(folder / f"{ranks}.pt").items():
            difference = max((weights[name] - one[name]).abs().max().item() for name in one)
            print(f"{ranks} ranks, {strategy}: the weights differ from those of one rank by at most {difference:.1e}")


if __name__ == "__main__":
    main()
