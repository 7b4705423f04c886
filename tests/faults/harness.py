"""Bad inputs as a table: what is wrong, the exit code, and the sentence that the user reads.

A `Fault` is a script or a command line. A script runs as one or several ranks in processes that are forked from one
that has imported torch, which takes a fraction of a second. A command line is a real process.

`check` asserts the exit code of every rank, the sentence in the output of one of them, and that all have ended within
`SECONDS` times `BUSY_FACTOR`. Most faults shorten the timeouts of samestep to save time. Those that once hung also have
a case with the default timeouts, marked by `HANGS` in their tables.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_all_start_methods, get_context, set_forkserver_preload, set_start_method
from pathlib import Path
from textwrap import dedent

import pytest

from tests.warm import PRELOADED, free_port, torchrun_variables, without_launcher_variables

SECONDS = 30.0  # in which a fault must be reported
BUSY_FACTOR = 4.0  # a machine that runs other tests at the same time may need this many times as long


@dataclass(frozen=True)
class Fault:
    """One bad input: `says` is a regular expression, found in the output of a rank with its white space joined."""

    name: str
    says: str
    code: int = 1
    script: str = ""
    """The source of train.py, which runs as `ranks` ranks."""
    ranks: int = 1
    command: str = ""
    """A shell command line, in which `samestep` and `python` are those of this environment."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    prepare: Callable[[Path], object] | None = None
    """Called with the folder of the test before the start."""
    why_not: str | None = None
    """Why it cannot be tested here; the test is skipped with this reason."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a fault ended, rank by rank."""

    codes: list[int]
    outputs: list[str]
    seconds: float


def cases(faults: list[Fault]) -> pytest.MarkDecorator:
    """Parametrize a test with a table of faults, by their names."""
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names), "two faults have the same name"
    skips = [pytest.mark.skipif(fault.why_not is not None, reason=fault.why_not or "") for fault in faults]
    rows = zip(faults, names, skips, strict=True)
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=name, marks=skip) for fault, name, skip in rows])


def check(fault: Fault, folder: Path) -> Ended:
    """Run a fault; every rank must end with its exit code, and the sentence must be in the output of one of them."""
    if fault.prepare is not None:
        fault.prepare(folder)
    ended = run_command(fault, folder) if fault.command else run_script(fault, folder)
    shown = "\n".join(f"rank {rank}: exit code {code}\n{text}" for rank, (code, text) in
                      enumerate(zip(ended.codes, ended.outputs, strict=True)))  # fmt: skip
    assert set(ended.codes) == {fault.code}, f"expected exit code {fault.code}\n{shown}"
    found = any(re.search(fault.says, " ".join(text.split())) for text in ended.outputs)
    assert found, f"expected: {fault.says}\n{shown}"
    assert ended.seconds < SECONDS * BUSY_FACTOR, f"it took {ended.seconds:.0f} s\n{shown}"
    return ended


def check_together(faults: list[Fault], folder: Path) -> None:
    """Check faults at the same time: while one waits for a timeout, it uses no core."""

    def check_one(number: int, fault: Fault) -> BaseException | None:
        own = folder / str(number)
        own.mkdir()
        try:
            check(fault, own)
        except BaseException as error:  # noqa: BLE001  # raised below, with those of the others
            error.add_note(f"the fault: {fault.name}")
            return error
        return None

    possible = [fault for fault in faults if fault.why_not is None]
    with ThreadPoolExecutor(max(1, len(possible))) as pool:
        errors = [error for error in pool.map(check_one, range(len(possible)), possible) if error is not None]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(possible)} faults", errors)
    if len(possible) < len(faults):
        pytest.skip(", ".join({fault.why_not or "" for fault in faults} - {""}) + ": some faults were not tested")


def run_command(fault: Fault, folder: Path) -> Ended:
    """Run a command line in a new session."""
    since = time.monotonic()
    environment = {**without_launcher_variables(os.environ), **fault.environment}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    process = subprocess.Popen(
        fault.command, shell=True, executable="/bin/bash", cwd=folder, env=environment, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=SECONDS * BUSY_FACTOR)[0]
    finally:
        _kill_session(process.pid)
    return Ended([process.returncode], [output], time.monotonic() - since)


def run_script(fault: Fault, folder: Path) -> Ended:
    """Run a script as ranks that torchrun would have started."""
    script = folder / "train.py"
    script.write_text(dedent(fault.script))
    _start_fork_server()
    context, port, since = get_context("forkserver"), free_port(), time.monotonic()
    processes, outputs = [], [folder / f"output-{rank}" for rank in range(fault.ranks)]
    for rank, output in enumerate(outputs):
        environment = {
            **without_launcher_variables(os.environ), **torchrun_variables(rank, fault.ranks, 1, port),
            **fault.environment,
        }  # fmt: skip
        process = context.Process(target=_run_as_main, args=(str(script), str(folder), environment, str(output)))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(max(0.1, since + SECONDS * BUSY_FACTOR - time.monotonic()))
    seconds, hung = time.monotonic() - since, [process for process in processes if process.is_alive()]
    for process in processes:
        _kill_session(process.pid)
        process.kill()
        process.join()
    texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
    assert not hung, f"{len(hung)} rank(s) did not end in {seconds:.0f} s\n" + "\n".join(texts)
    return Ended([process.exitcode or 0 for process in processes], texts, seconds)


@cache
def _start_fork_server() -> None:
    """Start the process that has imported torch, once: this takes minutes on a busy machine, and is not timed."""
    set_forkserver_preload(PRELOADED)
    process = get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()


def _run_as_main(script: str, folder: str, environment: dict[str, str], output: str) -> None:
    """In the forked process: become `python train.py`."""
    import runpy

    os.setsid()
    set_start_method(get_all_start_methods()[0], force=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.argv, sys.path[0:0] = [script], [folder]
    runpy.run_path(script, run_name="__main__")


def _kill_session(pid: int) -> None:
    """Kill what is left of the process group that a process has started for itself."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
