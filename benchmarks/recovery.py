"""Recovery from a killed rank: torchrun compared with `samestep run`, by success rate and time.

    python benchmarks/recovery.py [--kills 10] [--ranks 2] [--timeout 60]

Each variant is started again for every kill, with three restarts allowed. After all ranks have trained some steps, one
of them gets SIGKILL after a random delay that is the same for all variants. "recovered" counts the launches whose ranks
all train again within the timeout; "at the first restart" counts those that needed one restart only. The time runs
from the kill to the first step of the new processes.

Variants: a hand-written DDP script under torchrun, samestep's Run under torchrun, and samestep's Run under `samestep
run`. All train the same small model over gloo with one thread per rank, and save every 20 steps.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PAUSE = 0.02  # minimum seconds per step, so that all variants train at the same pace
SAVE_EVERY = 20
PREFIXES = ("SLURM_", "TORCHELASTIC_", "TORCH_", "GROUP_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "SAMESTEP_")
VARIANTS = {
    "torchrun, by hand": ("torch.distributed.run", "hand"),
    "torchrun, Run": ("torch.distributed.run", "run"),
    "samestep run": ("samestep", "run"),
}


@dataclass(frozen=True)
class StepRecord:
    """A line that a rank writes after each step."""

    time: float
    pid: int
    rank: int
    restart: int


@dataclass(frozen=True)
class Outcome:
    """The result of one kill; `seconds` is None if the ranks did not recover."""

    seconds: float | None
    restarts: int


def train_by_hand(out: Path) -> None:
    """DDP as in its tutorial, with a checkpoint by rank 0."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), out / "saved.pt"
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if saved.exists():
        model.load_state_dict(torch.load(saved, weights_only=True))
    for step in range(1_000_000):
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        record_step(out, rank)
        if rank == 0 and step % SAVE_EVERY == 0:
            torch.save(model.state_dict(), out / "saving.pt")
            (out / "saving.pt").replace(saved)


def train_by_run(out: Path) -> None:
    """The same with samestep."""
    import torch

    from samestep import Run

    with Run(global_batch=16, folder=out / "logs", precision="fp32") as run:
        model = run.wrap(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        train = run.shard(torch.utils.data.TensorDataset(torch.ones(1 << 20, 64)), num_workers=0)
        run.checkpoint(out / "saved", model=model, optimizer=optimizer, train=train).every(steps=SAVE_EVERY)
        for epoch in train.epochs(1000):
            for step in epoch:
                for (rows,) in step:
                    step.mean(model(rows).mean(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                record_step(out, run.rank)


def record_step(out: Path, rank: int) -> None:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with (out / "steps").open("a") as file:  # samestep: ignore[SS501] ranks append short lines
        file.write(f"{time.time()} {os.getpid()} {rank} {restart}\n")
    time.sleep(PAUSE)


def read_steps(out: Path) -> list[StepRecord]:
    path = out / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        StepRecord(float(moment), int(pid), int(rank), int(restart))
        for moment, pid, rank, restart in map(str.split, lines)
    ]


def wait_for_steps(out: Path, old: set[int], ranks: int, process: subprocess.Popen[bytes], timeout: float):
    """The step by which every rank has trained one in a new process; None if the launcher ends or after the timeout."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        firsts: dict[int, StepRecord] = {}
        for step in read_steps(out):
            if step.pid not in old:
                firsts.setdefault(step.rank, step)
        if len(firsts) == ranks:
            return max(firsts.values(), key=lambda step: step.time)
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    return None


def kill_once(module: str, how: str, ranks: int, rng: random.Random, timeout: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", module, *(["run", "--folder", folder] if module == "samestep" else [])]
        command += ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
        command += [__file__, "--train", how, folder]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
        with (out / "output").open("wb") as output:
            process = subprocess.Popen(
                command, env={**environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, start_new_session=True
            )
        try:
            victim, delay = rng.randrange(ranks), rng.uniform(0.0, 1.0)
            if wait_for_steps(out, set(), ranks, process, timeout) is None:
                raise SystemExit(f"the launch did not start:\n{(out / 'output').read_text()}")
            time.sleep(delay)
            steps = read_steps(out)
            pid = next(step.pid for step in steps if step.rank == victim)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.time()
            recovered = wait_for_steps(out, {step.pid for step in steps}, ranks, process, timeout)
            newest = max(step.restart for step in read_steps(out))
            return (
                Outcome(None, newest) if recovered is None else Outcome(recovered.time - killed_at, recovered.restart)
            )
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def report(outcomes: dict[str, list[Outcome]]) -> str:
    rows = [f"{'':20} {'recovered':>9} {'at the first restart':>21} {'median s':>9} {'longest s':>10}"]
    for name, each in outcomes.items():
        seconds = [outcome.seconds for outcome in each if outcome.seconds is not None]
        first = sum(outcome.seconds is not None and outcome.restarts == 1 for outcome in each)
        times = (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("-", "-")
        rows.append(f"{name:20} {len(seconds):>3} of {len(each):<2} {first:>21} {times[0]:>9} {times[1]:>10}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=2, metavar=("HOW", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        how, out = arguments.train
        {"hand": train_by_hand, "run": train_by_run}[how](Path(out))
        return
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arguments.only}
    for number in range(arguments.kills):
        for name in sorted(outcomes, key=lambda each: random.Random(f"{number} {each}").random()):
            rng = random.Random(arguments.seed * 1000 + number)
            outcome = kill_once(*VARIANTS[name], arguments.ranks, rng, arguments.timeout)
            outcomes[name].append(outcome)
            result = "did not recover" if outcome.seconds is None else f"recovered after {outcome.seconds:.1f} s"
            print(f"kill {number + 1}: {name} {result}, restarts {outcome.restarts}", flush=True)
    print(report(outcomes))


if __name__ == "__main__":
    main()
