"""How long training waits for a checkpoint of 500 MB: samestep, torch.save, dcp.save and dcp.async_save.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 5] [--device cpu]

All four save the same model and optimizer, in turns, in one process and to one disk. The medians are compared. samestep
also flushes every file, reads it again and compares checksums before it publishes; the total time includes this. The
benchmark fails if training waits more than half as long as for torch.save.
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

MAX_RATIO = 0.5
LAYERS = 16


def build(megabytes: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model whose weights and Adam moments take this many megabytes together."""
    width = round((megabytes * 1e6 / 4 / 3 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(folder: Path, megabytes: int, rounds: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Return, for each method, the seconds of the call and the seconds until the checkpoint was on the disk."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)  # required by async_save
    found: dict[str, list[tuple[float, float]]] = {}
    with Run(global_batch=1, folder=folder / "logs") as run:
        model, optimizer = build(megabytes, device)
        checkpoint = run.checkpoint(folder / "samestep", keep=1, model=model, optimizer=optimizer)

        def samestep_save() -> Callable[[], object]:
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

        methods = {
            "samestep": samestep_save,
            "torch.save": torch_save,
            "dcp.save": dcp_save,
            "dcp.async_save": dcp_async,
        }
        for number in range(rounds + 1):
            for name, save in methods.items():
                shutil.rmtree(
                    folder / {"dcp.save": "dcp", "dcp.async_save": "async"}.get(name, "-"), ignore_errors=True
                )
                os.sync()  # unwritten data of the previous method must not slow this one down
                started = time.perf_counter()
                wait = save()
                stall = time.perf_counter() - started
                wait()
                if number:  # the first round is warm-up: memory is allocated once
                    found.setdefault(name, []).append((stall, time.perf_counter() - started))
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
        total = statistics.median(total for _, total in times)
        ratio = stalls[name] / stalls["samestep"]
        print(f"  {name:<15} training waits {stalls[name]:6.3f} s ({ratio:4.1f} x samestep), total {total:6.3f} s")
    return 0 if stalls["samestep"] < MAX_RATIO * stalls["torch.save"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
