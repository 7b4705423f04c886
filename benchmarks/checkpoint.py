"""How long training stands still for a checkpoint of 500 MB: ours against torch.save, dcp.save and dcp.async_save.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 5] [--device cpu]

All four save the same model and optimizer, in turns, in one process and onto one disk; medians are compared. Ours also
flushes every file, reads it again and compares checksums before it publishes, which the time until it is on the disk
includes. The claim: training waits at most half as long as for torch.save. How long the copy takes is memory's matter.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from samestep import Run

MOST = 0.5
LAYERS = 16


def build(megabytes: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights and two moments take so many megabytes in all."""
    width = round((megabytes * 1e6 / 4 / 3 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(folder: Path, megabytes: int, rounds: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """For each way: seconds that the call took, and seconds until the file was on the disk."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save asks for one
    found: dict[str, list[tuple[float, float]]] = {}
    with Run(global_batch=1, folder=folder / "logs") as run:
        model, optimizer = build(megabytes, device)
        checkpoint = run.checkpoint(folder / "ours", keep=1, model=model, optimizer=optimizer)

        def ours() -> Callable[[], object]:
            checkpoint.save()
            return checkpoint.wait

        def torch_save() -> Callable[[], object]:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "torch.pt")
            return lambda: None

        def states() -> dict[str, object]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        def dcp_save() -> Callable[[], object]:
            dcp.save(states(), checkpoint_id=folder / "dcp")
            return lambda: None

        def dcp_async() -> Callable[[], object]:
            response = dcp.async_save(states(), checkpoint_id=folder / "async")
            return response.result

        ways = {"samestep": ours, "torch.save": torch_save, "dcp.save": dcp_save, "dcp.async_save": dcp_async}
        for number in range(rounds + 1):
            for name, way in ways.items():
                shutil.rmtree(
                    folder / {"dcp.save": "dcp", "dcp.async_save": "async"}.get(name, "-"), ignore_errors=True
                )
                os.sync()  # what the way before left to the system must not slow this one
                begin = time.perf_counter()
                wait = way()
                stall = time.perf_counter() - begin
                wait()
                if number:  # the first round warms up: memory is asked for once
                    found.setdefault(name, []).append((stall, time.perf_counter() - begin))
    dist.destroy_process_group()
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.megabytes, options.rounds, torch.device(options.device))
    print(f"{options.megabytes} MB of weights and moments on {options.device}, median of {options.rounds} rounds:")
    stalls = {name: statistics.median(stall for stall, _ in times) for name, times in found.items()}
    for name, times in found.items():
        whole = statistics.median(whole for _, whole in times)
        ratio = stalls[name] / stalls["samestep"]
        print(f"  {name:<15} training waits {stalls[name]:6.3f} s ({ratio:4.1f} x ours), call to end {whole:6.3f} s")
    return 0 if stalls["samestep"] < MOST * stalls["torch.save"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
