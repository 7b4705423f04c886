"""The cost of measuring which rank makes the others wait, in µs per step.

    python benchmarks/stragglers.py [--ranks 2] [--blocks 200] [--steps 20] [--micro-batches 1] [--width 256]

All ranks of this machine train a small model with DDP, on GPUs if there are any (several ranks may share one). Blocks
of steps with and without the measurement take turns in the same run. Printed is the fastest tenth of the blocks, which
the load of the machine changes least: the CPU time of rank 0 and the wall time. The limit is 0.5 % of a step of 10 ms:
50 µs. A number below zero is noise.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run

WARM_BLOCKS, STEP_US = 4, 10_000


def do_nothing(*_: object) -> None:
    """Take the place of a method that measures."""


def same_phase(phase: str) -> str:
    """Take the place of `StepTimes.enter`."""
    return phase


def switch(times, on: bool) -> None:
    """Turn the measurement of this rank on or off."""
    for name in ("begin_step", "begin_micro_batch", "end_step", "watch_backward"):
        if on:
            vars(times).pop(name, None)
        else:
            setattr(times, name, do_nothing)
    if on:
        vars(times).pop("enter", None)
        times._step_waited, times._pairs = times._comm.waited, []
    else:
        times.enter = same_phase


def train(rank: int, args: argparse.Namespace, port: int, folder: str) -> None:
    """Train on one rank; rank 0 prints the result."""
    warnings.filterwarnings("ignore")
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_WORLD_SIZE": args.ranks}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0")
    torch.set_num_threads(1)
    rows, per_rank = args.steps * (args.blocks + WARM_BLOCKS), 4 * args.micro_batches
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with Run(global_batch=per_rank * args.ranks, seed=0, folder=Path(folder), replica_check_every=0) as run:
        model = run.wrap(nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        times = run._lifecycle.context.times
        data = TensorDataset(torch.randn(rows * per_rank * args.ranks, args.width))
        started = time.perf_counter(), time.process_time()
        for epoch in run.shard(data, num_workers=0, micro_batch=4).epochs(1):
            for step in epoch:
                block, first = divmod(step.number, args.steps)
                if first == 0:
                    if run.device.type == "cuda":
                        torch.cuda.synchronize()
                    ended = time.perf_counter(), time.process_time()
                    if block > WARM_BLOCKS:
                        difference = ended[0] - started[0], ended[1] - started[1]
                        seconds[(block - 1) % 2 == 0].append(difference)
                    switch(times, on=block % 2 == 0)
                    started = time.perf_counter(), time.process_time()
                for (x,) in step:
                    step.mean(model(x)[:, 0].square()).backward()
                optimizer.step()
                optimizer.zero_grad()
        switch(times, on=True)
        device = f"{run.device.type}, {run._comm.backend}"
    if rank == 0:
        report(args, device, seconds)


def report(args: argparse.Namespace, device: str, seconds: dict[bool, list[tuple[float, float]]]) -> None:
    """Print the cost per step."""
    for index, name in ((1, "CPU time"), (0, "wall time")):
        blocks = {state: sorted(block[index] for block in seconds[state]) for state in (True, False)}
        fast = {state: statistics.mean(each[: max(1, len(each) // 10)]) for state, each in blocks.items()}
        on, off = (1e6 / args.steps * fast[state] for state in (True, False))
        print(
            f"{args.ranks} ranks ({device}), {args.micro_batches} micro-batch(es): {name} {on:.1f} µs per step with "
            f"and {off:.1f} µs without it: {on - off:+.1f} µs, {100 * (on - off) / STEP_US:+.2f} % of 10 ms"
        )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--blocks", type=int, default=200, help="blocks of steps that are compared, half of them with it"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches per step and rank")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    args = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(train, (args, port, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
