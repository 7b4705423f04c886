"""The cost of samestep's hang probe in a healthy run: at the start of a process, per request and per step.

    python benchmarks/hang_probe.py [--rounds 15] [--json]

`samestep run` adds three things to a rank: the probe that Python loads at its start, torch's flight recorder (which
torch turns on by itself, with the same size) and one request per second. Each is measured with and without it, in turn,
so that a change of the machine's speed affects both. CPU seconds of a process with all its threads are compared, which
other processes on the machine disturb less than wall seconds. The cost of the recorder is that of a collective of one
rank on gloo, the fastest of all rounds, times 10 collectives per step. The share is that of recorder and requests in a
step of 10 ms, and must be below 0.5 %. For comparison, the benchmark trains with 2 ranks on gloo and shows the median.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack

from samestep.hang.node_evidence import NodeProbe

STEP_SECONDS, COLLECTIVES, LIMIT = 0.010, 10, 0.005
RANK = f"""
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
matrix, gradients = torch.randn(256, 256), [torch.randn(2000) for _ in range({COLLECTIVES})]
steps = torch.zeros(1)
print("ready", flush=True)
while True:
    steps[0] = int(sys.stdin.readline() or 0) if dist.get_rank() == 0 else 0
    dist.all_reduce(steps)
    if not steps:
        break
    used, began = time.process_time(), time.perf_counter()
    for _ in range(int(steps)):
        for gradient in gradients:
            if len(sys.argv) > 1:
                matrix @ matrix
            dist.all_reduce(gradient)
    if dist.get_rank() == 0:
        print(time.process_time() - used, time.perf_counter() - began, flush=True)
"""


class Contender:
    """Ranks that wait for the number of steps to train."""

    def __init__(self, probe, recorder, size=2, has_compute=True):
        self.probe = probe
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        environ |= {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000" if recorder else "0"}
        environ |= probe.variables(environ) if probe is not None else {}
        command = [sys.executable, "-c", RANK, *(["compute"] if has_compute else [])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [subprocess.Popen(command, env=environ | {"RANK": str(rank)}, **pipes) for rank in range(size)]
        for rank in self.ranks:
            assert rank.stdout.readline() == "ready\n"

    def train(self, steps):
        """CPU and wall seconds per step."""
        stop = threading.Event()
        asking = threading.Thread(target=self._ask, args=[stop])
        asking.start()
        self.ranks[0].stdin.write(f"{steps}\n")
        self.ranks[0].stdin.flush()
        used, took = map(float, self.ranks[0].stdout.readline().split())
        stop.set()
        asking.join()
        return used / steps, took / steps

    def _ask(self, stop):
        while self.probe is not None and not stop.wait(1):
            self.probe.progress_of([rank.pid for rank in self.ranks])

    def end(self):
        """End the ranks."""
        self.ranks[0].stdin.close()
        for rank in self.ranks:
            rank.wait(60)
            rank.stdout.close()


def measure_start(rounds):
    """CPU seconds that the probe adds to the start of a Python process, with bytecode files as pip installs them."""
    probe = NodeProbe()
    with tempfile.TemporaryDirectory() as cache:
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        plain["PYTHONPYCACHEPREFIX"] = cache
        environs = {"without": plain, "with": plain | probe.variables(plain)}
        seconds = {name: [] for name in environs}
        for number in range(rounds + 1):
            for name, environ in environs.items():
                child = subprocess.Popen([sys.executable, "-c", "pass"], env=environ)
                _, status, usage = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
                if number:  # the first writes the bytecode files
                    seconds[name].append(usage.ru_utime + usage.ru_stime)
    probe.close()
    return statistics.median(seconds["with"]) - statistics.median(seconds["without"])


def measure_recorder(rounds):
    """CPU seconds that the flight recorder adds to a collective."""
    with ExitStack() as stack:
        contenders = [Contender(None, recorder, 1, has_compute=False) for recorder in (False, True)]
        for contender in contenders:
            stack.callback(contender.end)
        best = [float("inf"), float("inf")]
        for _ in range(5 * rounds):
            for index, contender in enumerate(contenders):
                best[index] = min(best[index], contender.train(200)[0] / COLLECTIVES)
    return best[1] - best[0]


def measure_request(contender, requests=2000):
    """CPU seconds that a rank spends on a request, while it waits."""
    pid = contender.ranks[1].pid
    before = cpu_seconds(pid)
    answered = sum(contender.probe.progress(pid) is not None for _ in range(requests))
    return (cpu_seconds(pid) - before) / answered


def cpu_seconds(pid):
    """CPU time of all threads of a process, in the nanoseconds of the scheduler."""
    folder = f"/proc/{pid}/task"
    return sum(int(open(f"{folder}/{each}/schedstat").read().split()[0]) for each in os.listdir(folder)) / 1e9  # noqa: PTH123, PTH208


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        probe = NodeProbe()
        stack.callback(probe.close)
        contenders = {
            "plain": Contender(None, recorder=False),
            "recorder": Contender(None, recorder=True),
            "probe": Contender(probe, recorder=True),
        }
        for contender in contenders.values():
            stack.callback(contender.end)
        request = measure_request(contenders["probe"])
        seconds = {name: [] for name in contenders}
        walls = {name: [] for name in contenders}
        for number in range(args.rounds + 1):
            for name in sorted(contenders, key=lambda name: hash((number, name))):
                used, took = contenders[name].train(200)
                if number:  # the first warms up
                    seconds[name].append(used)
                    walls[name].append(took)
        plain, recorder, probed = (statistics.median(seconds[name]) for name in contenders)
        recorded = measure_recorder(args.rounds)
        share = (COLLECTIVES * max(0.0, recorded) + request * STEP_SECONDS) / STEP_SECONDS
        result = {
            "start_ms": 1e3 * measure_start(10 * args.rounds),
            "request_us": 1e6 * request,
            "recorder_us_per_collective": 1e6 * recorded,
            "cpu_ms_per_step": {"plain": 1e3 * plain, "recorder": 1e3 * recorder, "probe": 1e3 * probed},
            "wall_ms_per_step": {name: 1e3 * statistics.median(each) for name, each in walls.items()},
            "ratio_probe_plain": statistics.median(
                a / b for a, b in zip(seconds["probe"], seconds["plain"], strict=True)
            ),
            "share": share,
            "is_below_limit": share < LIMIT,
        }
    print(json.dumps(result, indent=None if args.json else 2))
    return 0 if share < LIMIT else 1


if __name__ == "__main__":
    began = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
