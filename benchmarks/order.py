"""Compare the sample order with the distributed samplers of torch and torchdata: latency, throughput and memory.

    python benchmarks/order.py [--quick] [--rounds 3] [--worlds 1 8] [--json]

Each figure comes from a separate process, so its memory is that of the figure alone. The samplers take turns in every
round, and the best round counts. An epoch is read as a DataLoader reads it, in lists of 256 Python integers per step
(torch and torchdata through torch's BatchSampler); "arrays" is the same in numpy arrays, which only samestep has. A
world of one rank favors the others: with W ranks each of them still makes the full list to use one index in W. At n =
1e9 only samestep runs, since the others would need about 46 GB. Best and ratio are of CPU time, so that a busy machine
does not change them; the wall time is in parentheses.
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
SAMPLERS = ("samestep", "torch", "torchdata")
FIGURES = {
    "first": "first index of a new epoch",
    "resume": "first index after a resume at 0.9 n",
    "epoch": "all indices of one rank, lists of 256",
    "arrays": "all indices of one rank, arrays of 256",
}
LATENCY = ("first", "resume")
OTHERS_UP_TO = 10**8

Figures = dict[str, Callable[[], int]]


class Samples:
    """A dataset that has only a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


def samestep_figures(n: int, world: int) -> Figures:
    from samestep.data.partition import Partition
    from samestep.data.permutation import OrderReader, SampleOrder

    partition = Partition(n, global_batch=ROWS * world, rank=0, world_size=world)
    reader = OrderReader(SampleOrder(n, seed=0, shuffle=True), partition.read_range, partition.steps)
    return {
        "first": lambda: reader.read(1, 0).tolist()[0],
        "resume": lambda: reader.read(1, partition.steps * 9 // 10).tolist()[0],
        "epoch": lambda: sum(len(reader.read(1, step).tolist()) for step in range(partition.steps)),
        "arrays": lambda: sum(reader.read(1, step).size for step in range(partition.steps)),
    }


def torch_figures(n: int, world: int) -> Figures:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)
    return {
        "first": lambda: next(iter(sampler)),
        "resume": lambda: next(islice(sampler, len(sampler) * 9 // 10, None)),
        "epoch": lambda: read_as_lists(sampler),
    }


def torchdata_figures(n: int, world: int) -> Figures:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Samples(n), num_replicas=world, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(1)

    def resume() -> int:
        sampler.load_state_dict({"yielded": len(sampler) * 9 // 10})
        return next(iter(sampler))

    return {"first": lambda: next(iter(sampler)), "resume": resume, "epoch": lambda: read_as_lists(sampler)}


def read_as_lists(sampler) -> int:
    from torch.utils.data import BatchSampler

    return sum(map(len, BatchSampler(sampler, ROWS, drop_last=False)))


def measure(sampler: str, figure: str, n: int, world: int) -> dict[str, float]:
    """Measure one figure in this process: seconds, CPU seconds, added peak memory in MiB, number of indices."""
    make = {"samestep": samestep_figures, "torch": torch_figures, "torchdata": torchdata_figures}[sampler]
    make(10_000, world)[figure]()  # imports and first calls are not measured
    run = make(n, world)[figure]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, start = time.process_time(), time.perf_counter()
    result = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": added, "count": 1 if figure in LATENCY else result}


def measure_in_process(sampler: str, figure: str, n: int, world: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", sampler, figure, str(n), "--worlds", str(world)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def rows(sizes: tuple[int, ...], rounds: int, worlds: list[int]) -> Iterator[dict[str, object]]:
    for figure in FIGURES:
        for n, world in product(sizes, worlds[:1] if figure in LATENCY else worlds):
            if n > OTHERS_UP_TO and figure not in LATENCY:
                continue
            alone = n > OTHERS_UP_TO or figure == "arrays"
            samplers = SAMPLERS[:1] if alone else SAMPLERS
            results: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
            for _ in range(rounds):
                for name in samplers:
                    results[name].append(measure_in_process(name, figure, n, world))
            best = {name: min(rounds_of, key=lambda one: one["cpu_seconds"]) for name, rounds_of in results.items()}
            for name in samplers:
                ratio = best[name]["cpu_seconds"] / best["samestep"]["cpu_seconds"]
                yield {"figure": figure, "n": n, "world": world, "sampler": name, **best[name], "times": ratio}


def line(row) -> str:
    if row["figure"] in LATENCY:
        cpu, wall = (f"{row[key] * 1e3:9.2f} ms " for key in ("cpu_seconds", "seconds"))
    else:
        cpu, wall = (f"{row['count'] / row[key] / 1e6:9.1f} M/s" for key in ("cpu_seconds", "seconds"))
    ratio = "" if row["sampler"] == "samestep" else f"{row['times']:10.1f} x the time of samestep"
    case = f"{row['figure']:6} n={row['n']:.0e} world={row['world']:<2} {row['sampler']:9}"
    return f"{case} {cpu} ({wall}) {row['mib']:8.1f} MiB{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 1e6 and 4e6 only, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8], help="numbers of ranks; the first for latency")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sampler, figure, n = args.one
        print(json.dumps(measure(sampler, figure, int(n), args.worlds[0])))
        return
    if not args.json:
        print("\n".join(f"{figure:7} {meaning}" for figure, meaning in FIGURES.items()), end="\n\n")
    sizes, rounds = ((10**6, 4 * 10**6), 1) if args.quick else ((10**6, 10**8, 10**9), args.rounds)
    for row in rows(sizes, rounds, args.worlds):
        print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
