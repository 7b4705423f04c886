"""Scripts that start their ranks by themselves, with torch.multiprocessing.spawn or with processes of their own.

verify first starts a script as torchrun does. If a process that it has started joins a process group, the script is
started again, once and without a rank. Its processes are forks, so that they need not import torch again.
"""

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from samestep.verify.recorder.line_trace import LineTrace
from samestep.verify.recorder.rank_process import end, run_until_stopped, seed_differently
from samestep.verify.recorder.recorder import MARKER, NEEDS_SPAWN, Recorder, StopScript, wrap


class SpawnedRanks:
    """Lets the processes that a script starts be ranks."""

    def __init__(self, recorder: Recorder, lines: LineTrace) -> None:
        self._recorder, self._lines = recorder, lines
        self._error: Exception | None = None  # of the function that a process runs

    def install(self) -> None:
        """Fork processes instead of starting new interpreters, and observe them if they are ranks."""
        for module in (multiprocessing, torch.multiprocessing):
            wrap(module, "get_context", self._get_context)
            wrap(module, "set_start_method", self._set_start_method)
        for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):  # a function hides the module
            wrap(owner, "start_processes", self._start_processes)
        wrap(torch.multiprocessing, "spawn", self._spawn)
        wrap(BaseProcess, "run", self._run)
        os.register_at_fork(after_in_child=self._after_fork)

    def _get_context(self, original: Any, method: str | None = None) -> Any:
        return original(None if method == "spawn" else method)

    def _set_start_method(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore the method: processes stay forks."""

    def _spawn(self, original: Any, function: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        self._check()
        return torch.multiprocessing.start_processes(function, args, nprocs, *rest[:2], **kwargs)

    def _start_processes(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._check()

        def observed(*arguments: Any) -> Any:  # torch turns an error of the function into an exit code
            try:
                return function(*arguments)
            except Exception as error:
                self._error = error
                raise

        return original(observed, *args[:4], **{**kwargs, "start_method": "fork"})

    def _check(self) -> None:
        if not self._recorder.settings.spawns:
            request_spawn(self._recorder)

    def _after_fork(self) -> None:
        if self._recorder.settings.spawns and self._recorder.rank is None:
            self._recorder.become_child()
            self._lines.restart()
            seed_differently()

    def _run(self, original: Any, process: BaseProcess) -> None:
        recorder = self._recorder
        if not recorder.settings.spawns or not recorder.is_own_process:
            original(process)
            return
        code, error = run_until_stopped(lambda: original(process))
        if recorder.rank is not None or code:
            end(recorder, code, error or (self._error if code else None))
        if error is not None and not isinstance(error, StopScript):
            raise error
        if code:
            sys.exit(code)


def request_spawn(recorder: Recorder) -> None:
    """End this process; verify starts the script again, once."""
    Path(recorder.settings.folder, MARKER).touch()
    os._exit(NEEDS_SPAWN)
