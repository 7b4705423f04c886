"""Start the scripts in tests/hang/scripts with a fault, several side by side, and compare what the launcher reports.

Each case is a real `samestep run` with two ranks. They mostly sleep until a timeout, so that several run at a time.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from samestep.environment.processes import process_is_gone
from tests.launch.launched import ForkedLauncher, Started, start

SCRIPTS = Path(__file__).parent / "scripts"
IF_ALL = pytest.mark.skipif(
    "SAMESTEP_TESTS_ALL_HANGS" not in os.environ, reason="takes minutes: set SAMESTEP_TESTS_ALL_HANGS=1"
)
AT_A_TIME = 5
RANKS = 2
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HANG_DEVICE": "cpu"}
TOO_LONG = 240.0  # seconds: only a launch that hangs takes as long
POLL_SECONDS = 0.1
LATEST_END = 10.0  # seconds after the timeout, if no process has to wait for a core


@dataclass(frozen=True)
class Case:
    """A fault in a script, and what the launcher must report."""

    script: str
    fault: str
    kind: str | None = ""  # of the cause of the hang; empty if the ranks fail instead, None if it may be either
    culprits: Sequence[int] = (1,)
    at: str | None = None  # mark of the line of the culprit; that of the fault by default
    waits: str = "waits"  # mark of the line in which the others wait; empty if none does
    says: str = ""  # a regular expression that the console contains
    code: int = 1
    options: Sequence[str] = ()
    timeout: float = 10.0
    prepare: Callable[[Path], None] | None = None
    during: Callable[["Launch"], None] | None = None  # called once, after rank 1 is in step 5
    preexec: Callable[[], object] | None = None  # called in the process of the launcher, before it starts
    ends: Literal["launcher", "ranks", ""] = "launcher"
    """What has ended soon after the timeout: only the ranks if they are restarted, nothing if they continue."""
    needs_input: bool = False  # whether the standard input of the ranks must be open

    @property
    def name(self) -> str:
        return f"{self.script}-{self.fault}"


class CoreLoad:
    """How many processes want to run per core of this machine: other tests may run at the same time."""

    def __init__(self) -> None:
        self._samples = list[tuple[float, float]]()  # when, and the load
        self._cores = len(os.sched_getaffinity(0))

    def sample(self) -> None:
        (running,) = re.findall(r"^procs_running (\d+)$", Path("/proc/stat").read_text(), re.M)
        self._samples.append((time.time(), (int(running) - 1) / self._cores))  # without this process

    def mean(self, begin: float, end: float) -> float:
        """The mean of the samples between two times; 0 without any."""
        inside = [load for at, load in self._samples if begin <= at <= end]
        return sum(inside) / len(inside) if inside else 0.0


@dataclass
class Launch:
    """A case that runs, or has ended. Points in time are in seconds since 1970."""

    case: Case
    started: Started
    begin: float
    load: CoreLoad = field(default_factory=CoreLoad)
    end: float = 0.0  # when the launcher had ended
    ranks: list[psutil.Process] = field(default_factory=list[psutil.Process])  # of the first attempt
    ranks_end: float = 0.0  # when these had ended
    run_folder: str = "kept"
    output: str = "console"
    is_disturbed: bool = False

    @property
    def folder(self) -> Path:
        return self.started.folder

    @property
    def console(self) -> str:
        return (self.folder / self.output).read_text()

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports of all hangs, the first one first."""
        return [
            json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{self.run_folder}/hang/report-*.json"))
        ]

    @property
    def times_out(self) -> float | None:
        """When the oldest collective that waits reaches its timeout; None if none waits.

        The rank that waits has recorded when it called the collective, so the time to start the ranks does not count.
        """
        pending = [
            each["called"] + each["timeout"]
            for report in self.reports[:1]
            for rank in report["ranks"]
            for each in rank["collectives"] or ()
            if each["is_pending"] and each["timeout"]
        ]
        return min(pending, default=None)

    @property
    def seconds_after_timeout(self) -> float | None:
        """From the timeout to the end of what must end; None if no rank waits, or if nothing must end."""
        if self.times_out is None or not self.case.ends:
            return None
        return (self.end if self.case.ends == "launcher" else self.ranks_end) - self.times_out

    def pid(self, rank: int) -> int:
        return int((self.folder / f"up-{rank}").read_text())

    def lines(self, mark: str) -> set[str]:
        """`file:line` of the lines of the script and of its modules that a comment marks."""
        files = [self.folder / "train.py", self.folder / "faults.py"]
        return {
            f"{path}:{number}"
            for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if re.search(rf"# {mark}(  #|$)", line)
        }

    def advance(self) -> bool:
        """Do what the case does from outside; returns whether the launcher still runs."""
        is_running = self.started.process.poll() is None
        if self.case.ends == "ranks" and not self.ranks_end:
            self._watch_ranks()
        if self.case.during and not self.is_disturbed and (self.folder / "disturbed-1").exists():
            self.is_disturbed = True
            self.case.during(self)
        if is_running and time.monotonic() - self.begin > TOO_LONG:
            for process in self.started.processes():
                process.kill()
        return is_running

    def _watch_ranks(self) -> None:
        """Note when the ranks of the first attempt have ended; those of later ones write the same files."""
        if not self.ranks:
            texts = [path.read_text() for path in self.folder.glob("up-*")]
            if len(texts) == RANKS and all(texts):
                with suppress(psutil.NoSuchProcess):  # they have ended by now
                    self.ranks = [psutil.Process(int(text)) for text in texts]
        elif all(map(process_is_gone, self.ranks)):
            self.ranks_end = time.time()

    def close(self) -> None:
        """Wait for the launcher, keep what it has printed, and close the input that a debugger waits for."""
        out, err = self.started.process.communicate(timeout=TOO_LONG)
        if isinstance(self.started.process, ForkedLauncher):
            (self.folder / self.output).write_text(out + err)

    def problems(self) -> Iterator[str]:
        """What differs from what the case expects."""
        case, console = self.case, self.console
        left = self.started.processes()
        for process in left:
            yield f"process {process.pid} is left: {process.cmdline()}"
            process.kill()
        if self.started.process.returncode != case.code:
            yield f"exit code {self.started.process.returncode} instead of {case.code}"
        yield from self._problems_of_time()
        if case.says and not re.search(case.says, console):
            yield f"the console does not contain {case.says!r}"
        if not case.kind:
            if self.reports and case.kind is not None:
                yield "a hang was reported"
            return
        if not self.reports:
            yield "no hang was reported"
            return
        yield from self._problems_of_report(self.reports[-1])
        yield from self._problems_of_console(console)

    def _problems_of_time(self) -> Iterator[str]:
        case, late, begin = self.case, self.seconds_after_timeout, self.times_out
        if late is None or begin is None:
            if case.ends and case.kind and case.kind != "ended":
                yield "no rank waits for another one in the first report"
            return
        if case.ends == "ranks" and not self.ranks_end:
            yield "the end of the ranks was not seen"
        load = max(1.0, self.load.mean(begin, begin + late))
        if late > LATEST_END * load:
            yield f"the {case.ends} ended {late:.1f} s after the timeout, with {load:.1f} processes per core"

    def _problems_of_report(self, report: dict[str, Any]) -> Iterator[str]:
        case, cause = self.case, report["cause"]
        victims = [rank for rank in range(RANKS) if rank not in case.culprits]
        found = cause["kind"], cause["culprits"], cause["waiting"]
        if found != (case.kind, list(case.culprits), victims):
            yield f"kind, culprits and waiting ranks are {found}, not {(case.kind, list(case.culprits), victims)}"
        shown = {f"{each['frame']['file']}:{each['frame']['line']}" for each in cause["sentences"] if each["frame"]}
        at = f"fault: {case.fault}" if case.at is None else case.at
        expected = [("culprit", at), ("waiters", case.waits)]
        for who, mark in expected:
            if mark and not shown & self.lines(mark):
                yield f"the line of the {who} is in {self.lines(mark)}, but the report has {shown}"

    def _problems_of_console(self, console: str) -> Iterator[str]:
        cause = self.reports[-1]["cause"]
        if f"samestep: {self.reports[0]['cause']['headline']}" not in console:
            yield "the headline of the first report is not on the console"
        report = console.rpartition(" ended because of it; ")
        if not report[1]:
            yield "the failure report does not begin with the cause"
            return
        rows = dict(re.findall(r"^  rank (\d+) +pid \d+ +(.*)$", report[2], re.M))
        for rank in range(RANKS):
            row, is_culprit = rows.get(str(rank), ""), rank in cause["culprits"]
            if is_culprit and cause["kind"] == "ended" and not row:  # with exit code 0
                continue
            if is_culprit != ("<- the cause" in row):
                yield f"the row of rank {rank} is {row!r}"
            if not is_culprit and not row.startswith("victim: "):
                yield f"rank {rank} is not shown as a victim: {row!r}"


def run_cases(
    cases: Sequence[Case], folder: Path, at_a_time: int = AT_A_TIME, variables: Mapping[str, str] = ON_CPU
) -> list[Launch]:
    """Run these cases, some in parallel; all processes have ended or are killed."""
    todo, running, ended = list(cases), list[Launch](), list[Launch]()
    load = CoreLoad()
    try:
        while todo or running:
            while todo and len(running) < at_a_time:
                running.append(_launch(todo.pop(0), folder, variables, load))
            load.sample()
            for each in list(running):
                if not each.advance():
                    running.remove(each)
                    ended.append(each)
                    each.end = time.time()
                    each.close()
            time.sleep(POLL_SECONDS)
    finally:
        for each in running:
            for process in each.started.processes():
                process.kill()
            each.close()
    return ended


def check(
    cases: Sequence[Case], folder: Path, at_a_time: int = AT_A_TIME, variables: Mapping[str, str] = ON_CPU
) -> list[Launch]:
    """Run these cases and fail with all that differs from what they expect."""
    launches = run_cases(cases, folder, at_a_time, variables)
    check_launches(launches)
    return launches


def check_launches(launches: Sequence[Launch]) -> None:
    """Fail with all that differs from what the cases of these launches expect."""
    found = {each.case.name: (list(each.problems()), each.console) for each in launches}
    bad = {name: value for name, value in found.items() if value[0]}
    assert not bad, "\n\n".join(
        f"{name}: {'; '.join(problems)}\n{console}" for name, (problems, console) in bad.items()
    )


def _launch(case: Case, parent: Path, variables: Mapping[str, str], load: CoreLoad) -> Launch:
    folder = parent / case.name
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "faults.py").write_text((SCRIPTS / "faults.py").read_text())
    if case.prepare is not None:
        case.prepare(folder)
    source = (SCRIPTS / f"{case.script}.py").read_text()
    options = ("--nproc-per-node", str(RANKS), "--folder", "kept", *case.options, "train.py", case.fault)
    variables = {"HANG_TIMEOUT": str(case.timeout), "OMP_NUM_THREADS": "1", **variables}
    if case.needs_input or case.preexec is not None:
        with (folder / "console").open("w") as console:
            streams = {"stdin": subprocess.PIPE, "stdout": console, "stderr": subprocess.STDOUT}
            started = start(folder, source, *options, env=variables, preexec_fn=case.preexec, **streams)
    else:  # forked, which saves the import of torch
        started = start(folder, source, *options, env=variables)
    return Launch(case, started, time.monotonic(), load)


def stop_rank_1(launch: Launch) -> None:
    """Stop rank 1 as Ctrl-Z or a debugger would."""
    os.kill(launch.pid(1), signal.SIGSTOP)
