"""The order of an epoch against torch's and torchdata's distributed samplers: latency, rate and memory.

    python benchmarks/order.py [--quick] [--rounds 3] [--worlds 1 8] [--json]

Each figure comes from a process of its own, so that memory is that figure's alone; contestants take turns in every
round, and the best round counts. An epoch is handed out as a DataLoader asks for it, in lists of 256 Python integers,
one list a step (the others through torch's BatchSampler); "arrays" is the same in numpy arrays, which only samestep
has. A world of one rank is the kindest to the others: on W ranks each of them still makes the whole list to use one
index in W. At n = 1e9 only samestep runs: the others would need some 46 GB. Best and ratio are of CPU time, so that a
busy machine does not change them; the time that passed stands beside.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product

ROWS = 256
CONTESTANTS = ("samestep", "torch", "torchdata")
FIGURES = {
    "first": "first index of a new epoch",
    "resume": "first index after a resume at 0.9 n",
    "epoch": "all indices of one rank, lists of 256",
    "arrays": "all indices of one rank, arrays of 256",
}
LATENCY = ("first", "resume")
PEERS_UP_TO = 10**8

Figures = dict[str, Callable[[], int]]


class Samples:
    """A dataset that is nothing but long."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


def of_samestep(n: int, world: int) -> Figures:
    from samestep.data.partition import Partition
    from samestep.data.permutation import OrderReader, SampleOrder

    cut = Partition(n, global_batch=ROWS * world, rank=0, world_size=world)
    reader = OrderReader(SampleOrder(n, seed=0, shuffle=True), cut.read_range, cut.steps)
    return {
        "first": lambda: reader.read(1, 0).tolist()[0],
        "resume": lambda: reader.read(1, cut.steps * 9 // 10).tolist()[0],
        "epoch": lambda: sum(len(reader.read(1, step).tolist()) for step in range(cut.steps)),
        "arrays": lambda: sum(reader.read(1, step).size for step in range(cut.steps)),
    }


def of_torch(n: int, world: int) -> Figures:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)
    return {
        "first": lambda: next(iter(sampler)),
        "resume": lambda: next(islice(sampler, len(sampler) * 9 // 10, None)),
        "epoch": lambda: through_lists(sampler),
    }


def of_torchdata(n: int, world: int) -> Figures:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)

    def resume() -> int:
        sampler.load_state_dict({"yielded": len(sampler) * 9 // 10})
        return next(iter(sampler))

    return {"first": lambda: next(iter(sampler)), "resume": resume, "epoch": lambda: through_lists(sampler)}


def through_lists(sampler) -> int:
    from torch.utils.data import BatchSampler

    return sum(map(len, BatchSampler(sampler, ROWS, drop_last=False)))


def measure(contestant: str, figure: str, n: int, world: int) -> dict[str, float]:
    """One figure in this process: seconds, CPU seconds, MiB that it added at its peak, indices."""
    make = {"samestep": of_samestep, "torch": of_torch, "torchdata": of_torchdata}[contestant]
    make(10_000, world)[figure]()  # imports and first calls are not what is measured
    run = make(n, world)[figure]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, start = time.process_time(), time.perf_counter()
    result = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": added, "count": 1 if figure in LATENCY else result}


def in_a_process(contestant: str, figure: str, n: int, world: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", contestant, figure, str(n), "--worlds", str(world)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def rows(sizes: tuple[int, ...], rounds: int, worlds: list[int]) -> Iterator[dict[str, object]]:
    for figure in FIGURES:
        for n, world in product(sizes, worlds[:1] if figure in LATENCY else worlds):
            if n > PEERS_UP_TO and figure not in LATENCY:
                continue
            alone = n > PEERS_UP_TO or figure == "arrays"
            contestants = CONTESTANTS[:1] if alone else CONTESTANTS
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
            for _ in range(rounds):
                for name in contestants:
                    taken[name].append(in_a_process(name, figure, n, world))
            best = {name: min(results, key=lambda one: one["cpu_seconds"]) for name, results in taken.items()}
            for name in contestants:
                ratio = best[name]["cpu_seconds"] / best["samestep"]["cpu_seconds"]
                yield {"figure": figure, "n": n, "world": world, "contestant": name, **best[name], "times": ratio}


def line(row) -> str:
    if row["figure"] in LATENCY:
        cpu, wall = (f"{row[key] * 1e3:9.2f} ms " for key in ("cpu_seconds", "seconds"))
    else:
        cpu, wall = (f"{row['count'] / row[key] / 1e6:9.1f} M/s" for key in ("cpu_seconds", "seconds"))
    ratio = "" if row["contestant"] == "samestep" else f"{row['times']:10.1f} x the time of samestep"
    case = f"{row['figure']:6} n={row['n']:.0e} world={row['world']:<2} {row['contestant']:9}"
    return f"{case} {cpu} ({wall}) {row['mib']:8.1f} MiB{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 1e6 and 4e6 only, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8], help="numbers of ranks; the first for latency")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        contestant, figure, n = args.one
        print(json.dumps(measure(contestant, figure, int(n), args.worlds[0])))
        return
    if not args.json:
        print("\n".join(f"{figure:7} {meaning}" for figure, meaning in FIGURES.items()), end="\n\n")
    sizes, rounds = ((10**6, 4 * 10**6), 1) if args.quick else ((10**6, 10**8, 10**9), args.rounds)
    for row in rows(sizes, rounds, args.worlds):
        print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
