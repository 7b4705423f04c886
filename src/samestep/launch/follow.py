"""Following a job: its log as it grows, until the job has ended."""

import time
from collections.abc import Callable
from pathlib import Path

from samestep.launch.sbatch import log_of
from samestep.launch.slurm import UNREACHABLE, JobState
from samestep.launch.submitted import Submitted, how_is

_PAUSE = 1.0  # seconds between two questions to SLURM, which others ask too
_LATE = 2.0  # seconds in which the last lines of a log may still come over a network drive
_CHUNK = 1 << 16


class LogTail:
    """Reads on in a file that another writes; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def rest(self) -> bytes:
        """What has come since the last call."""
        if not self._path.exists():
            return b""
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read(_CHUNK)
            self._read = file.tell()
        return text


def follow(submitted: Submitted, show: Callable[[bytes], None], say: Callable[[str], None]) -> JobState:
    """Show a job's log until it ends, and say when and why it waits; gives how it ended."""
    tail = LogTail(log_of(Path(submitted.folder), submitted.job))
    told = ""
    while True:
        state = how_is(submitted)
        _show_rest(tail, show)
        if state.ended:
            _wait_for_last_lines(tail, show)
            return state
        waits = state.reason if state.state in ("PENDING", UNREACHABLE) else ""
        if waits not in (told, ""):
            say(f"samestep: job {submitted.job} waits: {waits}")
        told = waits
        time.sleep(_PAUSE)


def _show_rest(tail: LogTail, show: Callable[[bytes], None]) -> int:
    shown = 0
    while text := tail.rest():
        show(text)
        shown += len(text)
    return shown


def _wait_for_last_lines(tail: LogTail, show: Callable[[bytes], None]) -> None:
    """A log on a network drive may lag behind the controller's word, so wait until nothing more comes."""
    until = time.monotonic() + _LATE
    while time.monotonic() < until:
        if _show_rest(tail, show):
            until = time.monotonic() + _LATE
        time.sleep(_LATE / 10)
