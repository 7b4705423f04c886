"""Real Python processes with the probe, as `samestep run` starts its ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

from samestep.hang.evidence import Frame, RankEvidence
from samestep.hang.node_evidence import NodeProbe
from tests.launch.launched import wait_for

ENDLESS = 're.match("(a+)+$", "a" * 60 + "b")'
"""Native code that holds the GIL."""


class ProbedProcesses:
    """Starts scripts that say when they are ready, and collects the evidence of them."""

    def __init__(self, folder: Path, probe: NodeProbe) -> None:
        self.folder, self.probe = folder, probe
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, code: str, *options: str, environ: Mapping[str, str] | None = None, wait: bool = True
    ) -> subprocess.Popen[str]:
        """Start a script; with `wait`, return when it has called `ready()`."""
        number = len(self._started)
        script, ready = self.folder / f"script{number}.py", self.folder / f"ready{number}"
        header = f"import pathlib, time; ready = pathlib.Path({str(ready)!r}).touch"
        script.write_text(header + "\n" + dedent(code).strip() + "\n")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        variables |= self.probe.variables(variables)
        process = subprocess.Popen(
            [sys.executable, *options, str(script)],
            env=variables, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        if wait:
            wait_for(lambda: ready.exists() or process.poll() is not None, 120)
            assert ready.exists(), f"the script ended: {process.stdout and process.stdout.read()}"
        return process

    def collect(self, process: subprocess.Popen[str]) -> RankEvidence:
        (evidence,) = self.probe.collect({0: process.pid}, {})
        return evidence

    def end(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            process.communicate()


@contextmanager
def probed(folder: Path) -> Iterator[ProbedProcesses]:
    """Start processes with the probe, and end them all."""
    probe = NodeProbe()
    processes = ProbedProcesses(folder, probe)
    try:
        yield processes
    finally:
        processes.end()
        probe.close()


def place(stack: list[Frame]) -> str:
    """The innermost line of a test's script on a stack: `script0.py:7 work`."""
    frame = next(frame for frame in stack if Path(frame.file).name.startswith("script"))
    return f"{Path(frame.file).name}:{frame.line} {frame.function}"
