"""The order of an epoch against torch's and torchdata's distributed samplers: latency, rate and memory.

    python benchmarks/order.py [--quick] [--rounds 3] [--world 1] [--json]

Each figure comes from a process of its own, so that memory is that figure's alone; contestants take turns in every
round, and the best round counts. Every contestant hands out Python integers, as a DataLoader's sampler does: samestep in
lists of one rank's 256 a step, the others one by one. At n = 1e9 only samestep runs: the others would need 50 GB.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

ROWS = 256
CONTESTANTS = ("samestep", "torch", "torchdata")
FIGURES = ("first", "resume", "epoch")
SIZES = {"first": (10**6, 10**8, 10**9), "resume": (10**6, 10**8, 10**9), "epoch": (10**6, 10**8)}
PEERS_UP_TO = 10**8


class Samples:
    """A dataset that is nothing but long."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


def of_samestep(n: int, world: int) -> tuple[Callable[[], object], Callable[[], object], Callable[[], int]]:
    from samestep.data.order import Order
    from samestep.data.order_reader import OrderReader
    from samestep.plan.batch import Cut

    cut = Cut(n, global_batch=ROWS * world, rank=0, size=world)
    reader = OrderReader(Order(n, seed=0, shuffle=True), cut.span, cut.steps)

    def epoch() -> int:
        count = 0
        for step in range(cut.steps):
            indices = reader.read(1, step).tolist()
            deque(indices, maxlen=0)
            count += len(indices)
        return count

    return lambda: reader.read(1, 0).tolist()[0], lambda: reader.read(1, cut.steps * 9 // 10).tolist()[0], epoch


def of_torch(n: int, world: int) -> tuple[Callable[[], object], Callable[[], object], Callable[[], int]]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)
    return (
        lambda: next(iter(sampler)),
        lambda: next(islice(sampler, len(sampler) * 9 // 10, None)),
        lambda: drain(sampler),
    )


def of_torchdata(n: int, world: int) -> tuple[Callable[[], object], Callable[[], object], Callable[[], int]]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)

    def resume() -> object:
        sampler.load_state_dict({"yielded": len(sampler) * 9 // 10})
        return next(iter(sampler))

    return lambda: next(iter(sampler)), resume, lambda: drain(sampler)


def drain(sampler) -> int:
    deque(sampler, maxlen=0)
    return len(sampler)


def measure(contestant: str, figure: str, n: int, world: int) -> dict[str, float]:
    """One figure in this process: seconds, CPU seconds, MiB that it added at its peak, indices."""
    make = {"samestep": of_samestep, "torch": of_torch, "torchdata": of_torchdata}[contestant]
    make(1000, world)[FIGURES.index(figure)]()  # imports and first calls are not what is measured
    run = make(n, world)[FIGURES.index(figure)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, start = time.process_time(), time.perf_counter()
    count = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": added, "count": count if figure == "epoch" else 1}


def in_a_process(contestant: str, figure: str, n: int, world: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", contestant, figure, str(n), "--world", str(world)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rows(sizes: dict[str, tuple[int, ...]], rounds: int, world: int) -> Iterator[dict[str, object]]:
    for figure in FIGURES:
        for n in sizes[figure]:
            contestants = [name for name in CONTESTANTS if name == "samestep" or n <= PEERS_UP_TO]
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
            for _ in range(rounds):
                for name in contestants:
                    taken[name].append(in_a_process(name, figure, n, world))
            best = {name: min(results, key=lambda one: one["seconds"]) for name, results in taken.items()}
            for name in contestants:
                ratio = best[name]["seconds"] / best["samestep"]["seconds"]
                yield {"figure": figure, "n": n, "contestant": name, **best[name], "times_samestep": ratio}


def line(row) -> str:
    if row["figure"] == "epoch":
        speed = f"{row['count'] / row['seconds'] / 1e6:8.1f} M/s "
    else:
        speed = f"{row['seconds'] * 1e3:8.2f} ms  "
    ratio = "" if row["contestant"] == "samestep" else f"   {row['times_samestep']:8.1f} x the time of samestep"
    return f"{row['figure']:7} n={row['n']:<11.0e} {row['contestant']:10} {speed} {row['mib']:8.1f} MiB{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 1e6 and 4e6 only, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world", type=int, default=1, help="number of ranks; 1 is the kindest to the other two")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        contestant, figure, n = args.one
        print(json.dumps(measure(contestant, figure, int(n), args.world)))
        return
    sizes = dict.fromkeys(FIGURES, (10**6, 4 * 10**6)) if args.quick else SIZES
    if not args.json:
        print(
            "first: first index of a new epoch; resume: first index after a resume at 0.9 n; epoch: all indices, one rank"
        )
    for row in rows(sizes, 1 if args.quick else args.rounds, args.world):
        print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
