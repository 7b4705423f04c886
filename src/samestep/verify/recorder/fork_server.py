"""A Python process that has imported torch and forks the ranks of `samestep verify`, which saves seconds for each.

It reads one request per line from its standard input and answers with the process id, and later with the exit status
of what it has forked. Two such processes have different seeds for hashes, so that the order of a set differs.
"""

import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, Final

from samestep.environment.processes import adopt_orphans, kill_descendants
from samestep.environment.world import export, read_environ
from samestep.verify.recorder.install import OBSERVERS, PRELOADED, install, run_script
from samestep.verify.recorder.rank_process import seed_differently, use_cores_of
from samestep.verify.recorder.recorder import VARIABLE, load_settings

_POLL_SECONDS: Final = 0.02


def main() -> None:
    """Serve requests until standard input is closed."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in (*PRELOADED, *OBSERVERS):
        __import__(name)
    adopt_orphans(True)  # what a rank leaves behind, so that it can be ended
    try:
        _serve(requests, answers)
    finally:  # also if verify was killed, and its end of the pipe is closed
        kill_descendants()
        os._exit(0)


def _serve(requests: int, answers: int) -> None:
    """Fork a rank for every request; returns once there are no more."""
    _answer(answers, ready=True)
    pending = b""
    while True:
        readable, _, _ = select.select([requests], [], [], _POLL_SECONDS)
        _collect(answers)
        if not readable:
            continue
        data = os.read(requests, 2**20)
        if not data:  # verify has ended, or was killed
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            for name in request["imports"]:
                with suppress(ImportError):
                    __import__(name)
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                os.close(requests)
                _become_rank(request)
            _answer(answers, started=pid, id=request["id"])


def _answer(file: int, **values: Any) -> None:
    os.write(file, json.dumps(values).encode() + b"\n")


def _collect(answers: int) -> None:
    """Report the processes that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _answer(answers, ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _become_rank(request: dict[str, Any]) -> None:
    """Run the script in this process, a fork, and end."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    export({**dict.fromkeys(read_environ()), **request["environment"]})
    os.chdir(request["folder"])
    os.getppid = lambda: request["parent"]  # scripts use it as an id that all ranks share
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = 1
    try:
        seed_differently()
        settings = load_settings(request["environment"][VARIABLE])
        if settings.is_reference and not settings.spawns:
            use_cores_of(settings.reference["size"])
        recorder = install(settings, request["rank"])
        code = run_script(recorder, request["target"], request["is_module"], request["arguments"])
    except BaseException:  # noqa: BLE001 - of verify itself: the output of a rank shows it
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the script may have closed it
                stream.flush()
        os._exit(code)  # a group of ranks that differ may not end by itself


if __name__ == "__main__":
    main()
