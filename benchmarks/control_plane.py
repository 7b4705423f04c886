"""The cost of the control plane: how long N ranks take to start and to step, compared with hand-written DDP.

    python benchmarks/control_plane.py [--nproc 8 32 64 128] [--rounds 3] [--limit 420] [--phases]
    python benchmarks/control_plane.py --store [--nproc 1024 4096]

Each contender starts N processes with gloo and one thread each, as torchrun does, imports what it needs and trains a
small model, so that what remains is the cost of starting, connecting and stepping together. Contenders take turns, and
ratios are medians over the rounds: by default 3 with up to 32 ranks, 1 with more, which also take fewer steps. "first"
is the time from the start of the processes to the end of the first optimizer step on the last rank, "step" the median
time of a step on rank 0 after that. A start of one rank comes first, so that the bytecode of all modules exists, as
after an installation. With --phases, a line whenever all ranks have finished a phase, and the seconds of rank 0 until
it has imported, connected, wrapped the model, stepped once, and stepped to the end. All starts of one number of ranks
together may take --limit seconds. With --store, the requests and the seconds that the store needs for one check of N
waiting ranks, which happens once per one to five seconds.
"""

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, ROWS = 64, 8
MANY = 32  # with more ranks than this, fewer steps and rounds
BYTECODE = str(Path(tempfile.gettempdir()) / "samestep-bytecode")
PHASES = ("import", "connect", "wrap", "first step", "all steps")


def step_counts(ranks: int) -> tuple[int, int]:
    """How many steps come before those that are timed, and how many are timed."""
    return (40, 160) if ranks <= MANY else (10, 40)


def train_with_ddp(mark) -> list[float]:
    """Train with a hand-written loop; returns when each step ended."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    mark("import")
    dist.init_process_group("gloo")
    mark("connect")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mark("wrap")
    data = TensorDataset(torch.randn(ROWS * dist.get_world_size() * sum(step_counts(dist.get_world_size())), WIDTH))
    ends = []
    for (x,) in DataLoader(data, ROWS, sampler=DistributedSampler(data)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not ends:
            mark("first step")
        ends.append(time.monotonic())
    dist.barrier()
    return ends


def train_with_samestep(mark) -> list[float]:
    """Train with samestep; returns when each step ended."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from samestep import Run

    torch.set_num_threads(1)
    mark("import")
    ranks = int(os.environ["WORLD_SIZE"])
    with Run(global_batch=ROWS * ranks, seed=0, precision="fp32") as run:
        mark("connect")
        model = run.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mark("wrap")
        data = run.shard(TensorDataset(torch.randn(ROWS * ranks * sum(step_counts(ranks)), WIDTH)), num_workers=0)
        ends = []
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).square().mean(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not ends:
                    mark("first step")
                ends.append(time.monotonic())
    return ends


def run_rank(contender: str, folder: Path) -> None:
    marks, rank = {}, os.environ["RANK"]

    def mark(phase: str) -> None:
        marks[phase] = time.monotonic()
        (folder / f"{rank} {phase}").touch()

    ends = (train_with_ddp if contender == "ddp" else train_with_samestep)(mark)
    mark("all steps")
    (folder / rank).write_text(json.dumps({"marks": marks, "ends": ends, "cpu": time.process_time()}))
    os._exit(0)  # gloo may abort a process that ends while its threads run


def start(contender: str, ranks: int, deadline: float = math.inf, phases: bool = False) -> dict[str, object]:
    """Run one contender on N ranks; returns its times in seconds."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as name:
        free.bind(("127.0.0.1", 0))
        port, folder = free.getsockname()[1], Path(name)
        free.close()
        since, processes = time.monotonic(), []
        for rank in range(ranks):
            environment = {
                **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                "PYTHONPYCACHEPREFIX": BYTECODE,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "GROUP_RANK": "0",
                "PYTHONWARNINGS": "ignore",
            }
            command = [sys.executable, Path(__file__).resolve(), "--rank-of", contender, folder]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=folder))
        try:
            wait(contender, folder, processes, deadline, phases)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
    ends = results[0]["ends"][step_counts(ranks)[0] :]
    marks = [since, *(results[0]["marks"][phase] for phase in PHASES)]
    return {
        "first": max(result["marks"]["first step"] for result in results) - since,
        "step": statistics.median(after - before for before, after in itertools.pairwise(ends)),
        "cpu": statistics.mean(result["cpu"] for result in results),
        "phases": [after - before for before, after in itertools.pairwise(marks)],
    }


def wait(contender: str, folder: Path, processes: list[subprocess.Popen], deadline: float, phases: bool) -> None:
    """Wait until all ranks have ended; with `phases`, print when all of them have finished each phase."""
    since, ranks, left = time.monotonic(), len(processes), list(PHASES)
    while None in (codes := [process.poll() for process in processes]) or left:
        done = {phase: len(list(folder.glob(f"* {phase}"))) for phase in left}
        while left and done[left[0]] == ranks:
            phase, seconds = left.pop(0), time.monotonic() - since
            if phases:
                print(f"     {ranks} ranks, {contender}: {phase} after {seconds:.1f} s", flush=True)
        if any(codes):
            raise SystemExit(f"{contender} on {ranks} ranks: exit codes {sorted({code for code in codes if code})}")
        if time.monotonic() > deadline:
            shown = ", ".join(f"{count} of them {phase}" for phase, count in done.items())
            raise TimeoutError(f"{contender} on {ranks} ranks did not end before the limit ({shown})")
        time.sleep(0.2)


def compare(ranks: int, rounds: int, limit: float, phases: bool) -> None:
    """Let the contenders take turns, and print the ratios."""
    times, deadline = {"ddp": [], "samestep": []}, time.monotonic() + limit
    try:
        for turn in range(rounds):
            for contender in sorted(times, reverse=bool(turn % 2)):
                times[contender].append(start(contender, ranks, deadline, phases))
    except TimeoutError as error:
        print(f"{ranks:4d} ranks: {error}", flush=True)
    complete = min(map(len, times.values()))  # a round that the limit has ended does not count
    if not complete:
        return
    times = {contender: rows[:complete] for contender, rows in times.items()}
    median = {
        (contender, what): statistics.median(each[what] for each in times[contender])
        for contender in times
        for what in ("first", "step", "cpu")
    }

    def ratio(what: str) -> float:
        pairs = zip(times["samestep"], times["ddp"], strict=True)
        return statistics.median(ours[what] / theirs[what] for ours, theirs in pairs)

    print(
        f"{ranks:4d} ranks: first step {median['samestep', 'first']:.2f} against {median['ddp', 'first']:.2f} s "
        f"({ratio('first'):.2f} x), steady step {1e3 * median['samestep', 'step']:.2f} against "
        f"{1e3 * median['ddp', 'step']:.2f} ms ({ratio('step'):.2f} x), CPU of a rank {median['samestep', 'cpu']:.1f} "
        f"against {median['ddp', 'cpu']:.1f} s",
        flush=True,
    )
    for contender, rows in times.items() if phases else ():
        seconds = [statistics.median(values) for values in zip(*(row["phases"] for row in rows), strict=True)]
        shown = ", ".join(f"{phase} {value:.2f} s" for phase, value in zip(PHASES, seconds, strict=True))
        print(f"     {contender}: {shown}", flush=True)


def measure_store(ranks: int) -> None:
    """Print what one check of all waiting ranks costs the store: one process with the status boards of all of them."""
    import threading

    import torch.distributed as dist

    from samestep.distributed.rank_status import StatusBoard

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin, threading.Thread.start = threading.Thread.start, lambda _: None  # without the threads that answer
    boards = [StatusBoard(store, rank, ranks) for rank in range(ranks)]
    threading.Thread.start = begin
    for board in boards[1:]:
        board.enter("run.barrier", "train.py:1")
    checks = []
    for _ in range(5):
        since = time.monotonic()
        for board in boards[1:]:
            board.look()
        checks.append(time.monotonic() - since)
    print(f"{ranks:5d} ranks: a check of all of them takes {1e3 * statistics.median(checks):.0f} ms of one connection")
    os._exit(0)  # the boards would wait for threads that were never started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, help="starts of each contender")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for all starts of one number of ranks")
    parser.add_argument("--phases", action="store_true", help="also print what rank 0 spends its start on")
    parser.add_argument("--store", action="store_true", help="measure one check of many waiting ranks instead")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of[0], Path(args.rank_of[1]))
        return
    if args.store:
        for ranks in args.nproc or (1024, 4096):
            sys.stdout.flush()
            if not (child := os.fork()):
                measure_store(ranks)
            os.waitpid(child, 0)
        return
    for contender in ("ddp", "samestep"):
        start(contender, 1)
    for ranks in args.nproc or (8, 32, 64, 128):
        compare(ranks, args.rounds or (3 if ranks <= MANY else 1), args.limit, args.phases)


if __name__ == "__main__":
    main()
