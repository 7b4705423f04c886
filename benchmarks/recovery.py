"""What a killed rank costs: plain torchrun against samestep run, by who comes back and after how long.

    python benchmarks/recovery.py [--kills 10] [--ranks 2] [--patience 60]

For every kill each contender is started afresh, in turns, with three restarts allowed. Once all ranks have done some
steps, one of them gets SIGKILL after a random delay that is the same for all contenders. "back" counts the launches in
which, within the patience, all ranks step again; "at the first restart" those that needed no second one. Seconds run
from the kill to the first step that a new process has done.

Contenders: a DDP script written by hand under torchrun, samestep's Run under torchrun, and samestep's Run under
`samestep run`. All train the same small model over gloo, one thread each, and save every 20 steps.
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

PAUSE = 0.02  # seconds a step lasts at least, so that contenders wait alike
SAVE_EVERY = 20
PREFIXES = ("SLURM_", "TORCHELASTIC_", "TORCH_", "GROUP_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "SAMESTEP_")
CONTENDERS = {
    "torchrun, by hand": ("torch.distributed.run", "hand"),
    "torchrun, Run": ("torch.distributed.run", "run"),
    "samestep run": ("samestep", "run"),
}


@dataclass(frozen=True)
class Stepped:
    """A line that a rank wrote when it had done a step."""

    when: float
    pid: int
    rank: int
    restart: int


@dataclass(frozen=True)
class Outcome:
    """What became of one kill."""

    seconds: float | None
    restarts: int


def train_by_hand(out: Path) -> None:
    """DDP as its tutorial has it, with a checkpoint by the first rank."""
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
        tell(out, rank)
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
                tell(out, run.rank)


def tell(out: Path, rank: int) -> None:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with (out / "steps").open("a") as file:
        file.write(f"{time.time()} {os.getpid()} {rank} {restart}\n")
    time.sleep(PAUSE)


def read_steps(out: Path) -> list[Stepped]:
    path = out / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        Stepped(float(when), int(pid), int(rank), int(restart)) for when, pid, rank, restart in map(str.split, lines)
    ]


def wait_for_steps(out: Path, old: set[int], ranks: int, process: subprocess.Popen[bytes], patience: float):
    """The step by which every rank has done one in a new process; None where the launcher ends or time is up."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        firsts: dict[int, Stepped] = {}
        for step in read_steps(out):
            if step.pid not in old:
                firsts.setdefault(step.rank, step)
        if len(firsts) == ranks:
            return max(firsts.values(), key=lambda step: step.when)
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    return None


def kill_once(module: str, how: str, ranks: int, luck: random.Random, patience: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", module, *(["run", "--folder", folder] if module == "samestep" else [])]
        command += ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
        command += [__file__, "--train", how, folder]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
        with (out / "said").open("wb") as said:
            process = subprocess.Popen(
                command, env={**environ, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said, start_new_session=True
            )
        try:
            victim, delay = luck.randrange(ranks), luck.uniform(0.0, 1.0)
            if wait_for_steps(out, set(), ranks, process, patience) is None:
                raise SystemExit(f"it did not even start:\n{(out / 'said').read_text()}")
            time.sleep(delay)
            steps = read_steps(out)
            pid = next(step.pid for step in steps if step.rank == victim)
            os.kill(pid, signal.SIGKILL)
            killed = time.time()
            back = wait_for_steps(out, {step.pid for step in steps}, ranks, process, patience)
            newest = max(step.restart for step in read_steps(out))
            return Outcome(None, newest) if back is None else Outcome(back.when - killed, back.restart)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def report(outcomes: dict[str, list[Outcome]]) -> str:
    rows = [f"{'':20} {'back':>9} {'at the first restart':>21} {'median s':>9} {'longest s':>10}"]
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
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
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
            luck = random.Random(arguments.seed * 1000 + number)
            outcome = kill_once(*CONTENDERS[name], arguments.ranks, luck, arguments.patience)
            outcomes[name].append(outcome)
            told = "did not come back" if outcome.seconds is None else f"back after {outcome.seconds:.1f} s"
            print(f"kill {number + 1}: {name} {told}, restarts {outcome.restarts}", flush=True)
    print(report(outcomes))


if __name__ == "__main__":
    main()
