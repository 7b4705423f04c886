"""Run the tests and benchmarks that need an NVIDIA GPU, in parts of less than nine minutes, and keep their results.

    python tools/gpu_figures.py --list
    python tools/gpu_figures.py --part tests eager --minutes 9
    python tools/gpu_figures.py --part nccl ranks --nccl libnccl.so.2.xz --minutes 9

For every part, FOLDER/PART.txt has all that its commands print, and FOLDER/PART.json how each of them ended, its tests
and the rows of its tables. Both are complete after every command, so that a part that is interrupted is not lost. A
command that fails or reaches its limit stops no other. After --minutes no command is started and those that run are
ended: they are listed as "timed out" or "not run", never as passed. Commands whose tests are all skipped are "skipped",
with the reason. The exit status is 1 if a command has failed, timed out or was not run.

Parts with several ranks need as many GPUs, or one GPU and NCCL 2.30 or newer: docs/gpu_tests.md says where to get it.
--nccl names the library, as it is or compressed by xz, and sets LD_PRELOAD and NCCL_MULTI_RANK_GPU_ENABLE. Without it
such commands are skipped on one GPU. What the GPU machine lacks of pytest, transformers and so on can be on PYTHONPATH.

The minutes of the parts are estimates for one H200 with 16 cores; the limits of their commands are in PARTS.
"""

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
END_SECONDS = 10.0  # that an interrupted command gets to end its processes
LEAST_SECONDS = 5.0  # with less time left no command is started
SHOWN_LINES = 40  # of a command that did not pass
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
MODULES = [
    "pytest", "pytest_timeout", "hypothesis", "psutil", "click", "rich", "safetensors", "numpy", "transformers",
    "accelerate", "torchmetrics", "lightning", "pytorch_lightning",
]  # fmt: skip
MACHINE = f"""
import importlib.util, json, torch
from samestep.environment.gpus import nccl_version
print(json.dumps({{
    "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": list(nccl_version()) if torch.version.cuda else [],
    "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    "missing": [name for name in {MODULES!r} if importlib.util.find_spec(name) is None],
}}))
"""


@dataclass(frozen=True)
class Command:
    """A command of a part, run by this Python in the repository."""

    name: str
    arguments: tuple[str, ...]
    minutes: float  # its limit
    ranks: int = 1  # over NCCL
    alone: bool = True  # not at the same time as others, because it measures times or keeps the GPU busy

    @property
    def is_test(self) -> bool:
        """Whether pytest runs it."""
        return self.arguments[:2] == ("-m", "pytest")


@dataclass(frozen=True)
class Part:
    """Commands that belong together."""

    about: str
    minutes: float  # about, on one H200 with 16 cores
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    name: str
    command: str
    outcome: str = "not run"  # or "passed", "failed", "timed out", "skipped"
    seconds: float = 0.0
    exit_code: int | None = None
    reason: str = ""
    tests: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    output: str = ""


def of_tests(file: str, minutes: float, ranks: int = 1, alone: bool = False, only: str = "", name: str = "") -> Command:
    """The tests of a file; `only` is an expression for pytest's -k."""
    selected = ("-k", only) if only else ()
    arguments = ("-m", "pytest", f"tests/gpu/{file}.py", "-vv", "-rs", "--tb=short", *selected)
    return Command(name or file, arguments, minutes, ranks, alone)


def script(name: str, command: str, minutes: float, ranks: int = 1) -> Command:
    """A script of benchmarks/ with its options."""
    file, *options = command.split()
    return Command(name, (f"benchmarks/{file}", *options), minutes, ranks)


def overhead(name: str, options: str, minutes: float, ranks: int = 1) -> Command:
    """Rows of the table of overheads: contenders that take turns in one run."""
    return script(name, f"overhead.py --device cuda --nproc {ranks} {options}", minutes, ranks)


SLOW = "a_slow_rank"  # a wait of minutes, in which the GPU may do something else
FAULTS = "raises or killed or sleeping or flight_recorder or destroys or sys_exit"  # these mostly wait
FAMILIES = "chunked-gpt2 lstm gru mixtral wav2vec2 t5 convnext segformer detector proposals"
PARTS: dict[str, Part] = {
    "tests": Part(
        "tests/gpu without injected faults: training, memory, data, teachers, and NCCL with 2 and 4 ranks",
        6,
        (
            of_tests("test_nccl", 6, 4, only=f"not ({FAULTS})", name="test_nccl: training"),
            of_tests("test_gpu", 5),
            of_tests("test_memory", 4),
            of_tests("test_fsdp_memory", 4),
            of_tests("test_teacher", 4),
            of_tests("test_backends", 3),
            of_tests("test_checkpoint_memory", 3),
            of_tests("test_keyed_draws", 3),
            of_tests("test_linear_loss_gpu", 3),
            of_tests("test_no_sync", 3),
            of_tests("test_out_of_memory", 3),
            of_tests("test_prefetch", 3, alone=True),
            of_tests("test_step_time", 3, alone=True),
            of_tests("test_stragglers", 3, 2, alone=True),
        ),
    ),
    "hangs": Part(
        "faults injected over NCCL in scripts of four kinds: which rank and line is named, and when all ends",
        6,
        (
            of_tests("test_nccl_hangs", 8.5, 2, only=f"not ({SLOW})", name="test_nccl_hangs"),
            of_tests("test_nccl_hangs", 5, 2, only=SLOW, name="test_nccl_hangs: slow"),
            of_tests("test_nccl", 6, 2, only=FAULTS, name="test_nccl: faults"),
            of_tests("test_hang", 3, 2),
            of_tests("test_hang_probe", 3, 2),
        ),
    ),
    "eager": Part(
        "time and memory of a step on one rank: all tools, then the loss outside of the model, inside, and in chunks",
        4,
        (
            overhead("eager", "--rounds 4 --masked --newcomer", 5),
            overhead("losses", "--rounds 4 --contender samestep --loss outside fp32 forward chunked", 4),
        ),
    ),
    "compiled": Part(
        "the same with torch.compile, by hand and by samestep, also with the loss outside and compiled by itself",
        4,
        (overhead("compiled", "--rounds 4 --compile --contender samestep --loss outside compiled forward chunked", 8),),
    ),
    "ranks": Part(
        "time and memory of a step on two ranks: DDP with all tools, FSDP2 and zero2 by hand and by samestep",
        5,
        (
            overhead("ddp", "--rounds 4 --masked", 4, 2),
            overhead("sharded", "--rounds 4 --contender samestep --strategy fsdp zero2 --micro-batches 1 4", 5, 2),
        ),
    ),
    "families": Part(
        "forecast and measured peak memory of the models of benchmarks/model_families.py",
        3,
        (script("families", f"memory.py --case {FAMILIES}", 8),),
    ),
    "memory": Part(
        "the same of all models of benchmarks/memory.py, those of the table of the documentation first",
        7,
        (script("memory", "memory.py", 8.8),),
    ),
    "losses": Part(
        "two ranks with the loss in chunks, eager and compiled, with DDP and FSDP2",
        7,
        (
            overhead("eager", "--rounds 4 --contender samestep --strategy ddp fsdp --loss outside chunked", 4, 2),
            overhead("compiled", "--rounds 3 --compile --contender samestep --strategy ddp fsdp --loss chunked", 5, 2),
        ),
    ),
    "peers": Part("torch.compile with all tools, on one rank", 6, (overhead("peers", "--rounds 3 --compile", 8),)),
    "costs": Part(
        "parity over NCCL, the cost of measuring stragglers, and many ranks over gloo",
        4,
        (
            script("nccl_parity", "nccl_parity.py", 2, 3),
            script("stragglers", "stragglers.py", 3, 2),
            script("control_plane", "control_plane.py --nproc 8 128 --limit 150", 5),
        ),
    ),
}


def variables(nccl: Path | None, scratch: Path) -> dict[str, str]:
    """The environment of all commands."""
    paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if nccl is not None:
        library = nccl.resolve()
        if library.suffix == ".xz":
            library = scratch / "libnccl.so.2"
            library.write_bytes(lzma.decompress(nccl.read_bytes()))
        found |= {"LD_PRELOAD": str(library), SHARED_GPU: "1"}
    return found


def describe_machine(environ: Mapping[str, str]) -> dict[str, Any]:
    """The versions, the GPUs and the modules that are missing, as a command of a part finds them."""
    done = subprocess.run(
        [sys.executable, "-c", MACHINE], env=dict(environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"torch or samestep cannot be imported:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def why_not(command: Command, machine: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Why NCCL cannot connect the ranks of a benchmark here; empty if it can. Tests find out by themselves."""
    gpus, version = len(machine["gpus"]), ".".join(map(str, machine["nccl"]))
    if (
        command.is_test
        or gpus >= command.ranks
        or (tuple(machine["nccl"]) >= (2, 30) and environ.get(SHARED_GPU) == "1")
    ):
        return ""
    return f"{command.ranks} ranks over NCCL {version} need {command.ranks} GPUs, or NCCL 2.30 on one: pass --nccl"


class Runner:
    """Runs the commands of the parts until the time is over."""

    def __init__(self, folder: Path, environ: Mapping[str, str], machine: Mapping[str, Any], end: float) -> None:
        self._folder, self._environ, self._machine, self._end = folder, environ, machine, end
        self.results = dict[str, dict[str, Result]]()

    def prepare(self, parts: Mapping[str, Part]) -> None:
        """Write all files, with all commands as not run: a test fails if a new file appears in the repository."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            self.results[name] = {each.name: Result(each.name, " ".join(each.arguments)) for each in part.commands}
            self._write(name)

    def run(self, name: str, part: Part, at_a_time: int) -> None:
        """Run the commands of a part: first those that may run at the same time, then the others."""
        for group, workers in (
            ([each for each in part.commands if not each.alone], at_a_time),
            ([each for each in part.commands if each.alone], 1),
        ):
            with ThreadPoolExecutor(workers) as pool:
                for done in as_completed([pool.submit(self._run, each) for each in group]):
                    result = done.result()
                    self.results[name][result.name] = result
                    self._write(name)
                    print(line(name, result), flush=True)

    def _run(self, command: Command) -> Result:
        result = Result(command.name, " ".join(command.arguments))
        if reason := why_not(command, self._machine, self._environ):
            return replace(result, outcome="skipped", reason=reason)
        seconds = min(60 * command.minutes, self._end - time.monotonic())
        if seconds < LEAST_SECONDS:
            return replace(result, reason="no time was left")
        with tempfile.TemporaryDirectory(prefix="gpu-figures-") as scratch:
            return run_command(command, result, Path(scratch), self._environ, seconds)

    def _write(self, name: str) -> None:
        results = self.results[name].values()
        shown = [f"== {each.command}\n{each.output}{line(name, each)}\n" for each in results]
        (self._folder / f"{name}.txt").write_text("\n".join(shown))
        rows = [{key: value for key, value in asdict(each).items() if key != "output"} for each in results]
        value = {"part": name, "machine": self._machine, "commands": rows}
        (self._folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def run_command(command: Command, result: Result, scratch: Path, environ: Mapping[str, str], seconds: float) -> Result:
    """Run a command for at most this long, and read what it has left in files."""
    junit, rows, began = scratch / "tests.xml", scratch / "rows.json", time.monotonic()
    more = [f"--junitxml={junit}", f"--basetemp={scratch / 'tests'}"] if command.is_test else []
    if command.arguments[0] in ("benchmarks/overhead.py", "benchmarks/memory.py"):
        more = ["--json", str(rows)]
    with (scratch / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command.arguments, *more],
            cwd=REPOSITORY, env=dict(environ), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            outcome = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        end(process)
    text = (scratch / "output.txt").read_text(errors="replace")
    found = replace(
        result, outcome=outcome, seconds=round(time.monotonic() - began, 1), exit_code=process.returncode, output=text,
        tests=read_tests(junit), rows=read_rows(rows),
    )  # fmt: skip
    if outcome == "passed" and found.tests and all(each["outcome"] == "skipped" for each in found.tests):
        return replace(found, outcome="skipped", reason=found.tests[0]["message"])
    return found


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command with what it has started: it gets some seconds to end its processes by itself."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # all have ended
            break
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def read_tests(path: Path) -> list[dict[str, str]]:
    """The tests in a file of pytest's --junitxml; empty without one, as after a timeout."""
    if not path.exists():
        return []
    found = list[dict[str, str]]()
    for case in ET.parse(path).iter("testcase"):
        ended = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if ended is None else {"skipped": "skipped"}.get(ended.tag, "failed")
        message = "" if ended is None else ended.get("message", "")
        found.append(
            {"name": case.get("name", ""), "outcome": outcome, "seconds": case.get("time", ""), "message": message}
        )
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table as JSON, a list or one per line; without nested values, such as the operations of a trace."""
    if not path.exists() or not (text := path.read_text().strip()):
        return []
    rows = json.loads(text) if text.startswith("[") else [json.loads(each) for each in text.splitlines()]
    return [{key: value for key, value in row.items() if is_plain(value)} for row in rows]


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text, or a list of these."""
    return not isinstance(value, dict) and (not isinstance(value, list) or all(map(is_plain, value)))


def line(part: str, result: Result) -> str:
    """How a command ended, in one line."""
    outcomes = Counter(each["outcome"] for each in result.tests)
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    details = " - ".join(filter(None, [numbers, result.reason]))
    return f"{part:9} {result.name:22} {result.outcome:9} {result.seconds:6.1f} s  {details}".rstrip()


def report(results: Mapping[str, Mapping[str, Result]]) -> int:
    """Print the ends of the outputs, then how each command ended; returns the exit status."""
    all_results = [(part, each) for part, by_name in results.items() for each in by_name.values()]
    for part, each in all_results:
        if each.output and (each.outcome in ("failed", "timed out") or each.rows):
            print(f"\n== {part}: {each.name}\n" + "\n".join(each.output.splitlines()[-SHOWN_LINES:]))
    print()
    for part, each in all_results:
        print(line(part, each))
    bad = sum(each.outcome not in ("passed", "skipped") for _, each in all_results)
    skipped = sum(each.outcome == "skipped" for _, each in all_results)
    print(f"{len(all_results)} commands: {len(all_results) - bad - skipped} passed, {skipped} skipped, {bad} others")
    return int(bad > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=[], help="what to run, in this order")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all parts together")
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2 of NCCL 2.30 or newer, or libnccl.so.2.xz")
    parser.add_argument("--at-a-time", type=int, default=4, help="files of tests that run at the same time")
    options = parser.parse_args(arguments)
    if options.list or not options.part:
        for name, part in PARTS.items():
            ranks = max(each.ranks for each in part.commands)
            needs = f", up to {ranks} ranks over NCCL" if ranks > 1 else ""
            print(f"{name:9} about {part.minutes:2.0f} minutes{needs}: {part.about}")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-figures-") as scratch:
        environ = variables(options.nccl, Path(scratch))
        machine = describe_machine(environ)
        print(json.dumps(machine), flush=True)
        if not machine["gpus"]:
            print("torch finds no CUDA device: run this on a machine with an NVIDIA GPU", file=sys.stderr)
            return 2
        parts = {name: PARTS[name] for name in options.part}
        runner = Runner(options.out, environ, machine, began + 60 * options.minutes)
        runner.prepare(parts)
        for name, part in parts.items():
            runner.run(name, part, options.at_a_time)
    return report(runner.results)


if __name__ == "__main__":
    sys.exit(main())
