"""The log files of each rank and of the launcher, and which output of ranks the console shows."""

import fcntl
import json
import logging
import os
import pty
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from samestep.disk import AppendFile
from samestep.errors import LaunchError
from samestep.launch.job import ShowRanks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

_CHUNK = 1 << 16


class RankFiles:
    """The files of one rank in one attempt."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.out = folder / f"rank-{rank}.out"
        self.err = folder / f"rank-{rank}.err"
        self.screen = folder / f"rank-{rank}.log"  # stdout and stderr, if the rank has a terminal
        self.error = folder / f"rank-{rank}.error.json"  # the exception that ended the rank, in torch's format

    @property
    def last_written(self) -> Path:
        """The file that the rank has printed to last."""
        printed = [path for path in (self.screen, self.err, self.out) if path.exists() and path.stat().st_size]
        return max(printed, key=lambda path: path.stat().st_mtime, default=self.err)

    def rename_existing(self) -> None:
        """Rename the files of an earlier run in the same folder to `NAME.1`, `NAME.2` and so on."""
        for path in (self.out, self.err, self.screen, self.error):
            if path.exists():
                count = sum(1 for _ in self.folder.glob(f"{path.name}.*"))
                path.rename(path.with_name(f"{path.name}.{count + 1}"))


class AgentLog(logging.FileHandler):
    """The log file of torch's agent; records that a full disk loses are ignored."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        """Do nothing: logging would print a stack trace for every lost record."""


class LauncherEvents:
    """What a launcher sees, in logs/launcher-HOST.jsonl: one line per event, for `samestep report`."""

    def __init__(self, folder: Path, host: str, warn: Callable[[str], None]) -> None:
        self._path, self._warn = folder / f"launcher-{host}.jsonl", warn
        self._file: AppendFile | None = None
        self._lock = threading.Lock()  # a thread watches for hangs

    def record(self, event: str, **fields: object) -> None:
        """Record that something has happened."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, default=str).encode()
        with self._lock:
            if self._file is None:
                self._file = AppendFile(self._path, self._warn)
            self._file.append(line + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class RankLogs:
    """Opens the files of each attempt, and copies the ranks that are to be shown to the console."""

    def __init__(self, folder: Path, show: ShowRanks) -> None:
        self.folder = folder
        self.files: dict[int, RankFiles] = {}  # files of the current attempt by global rank
        self._show, self._shown = show, None
        self._mirror: TerminalMirror | None = None
        self._tails: list[TailLog] = []

    def open_agent_log(self, host: str) -> AgentLog:
        """Create the folder and the log file of torch's agent on this host."""
        with self._explain_os_error():
            self.folder.mkdir(exist_ok=True)
            return AgentLog(self.folder / f"launcher-{host}.log")

    def open(self, envs: Mapping[int, Mapping[str, str]]) -> "LogsDest":
        """Open the files of a new attempt, given the variables of its ranks by local rank."""
        from torch.distributed.elastic.multiprocessing import LogsDest

        self.close()
        folder = self.folder / f"attempt-{envs[0]['TORCHELASTIC_RESTART_COUNT']}"
        local = {local_rank: RankFiles(folder, int(env["RANK"])) for local_rank, env in envs.items()}
        self.files = {files.rank: files for files in local.values()}
        self._shown = local[0] if self._show == "first" else None
        with self._explain_os_error():
            folder.mkdir(parents=True, exist_ok=True)
            for files in local.values():
                files.rename_existing()
            return LogsDest(
                stdouts=self._connect({each: files.out for each, files in local.items()}, sys.stdout, local),
                stderrs=self._connect({each: files.err for each, files in local.items()}, sys.stderr, local),
                error_files={each: str(files.error) for each, files in local.items()},
            )

    def has_shown(self, rank: int) -> bool:
        """Whether the console shows all of a rank's output, unchanged and on the stream of the launcher's messages."""
        files = self._shown
        if files is None or files.rank != rank:
            return False
        printed = [path for path in (files.screen, files.out, files.err) if path.exists()]
        return printed == [files.screen] or [path for path in printed if path.stat().st_size] == [files.err]

    def close(self) -> None:
        """Show what has been written up to now, then stop following the files."""
        for tail in self._tails:
            tail.stop()
        self._tails = []
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    @contextmanager
    def _explain_os_error(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"cannot write the logs of the ranks to {self.folder} ({error.strerror}): choose another --folder"
            ) from error

    def _connect(self, paths: dict[int, Path], console: TextIO, local: dict[int, RankFiles]) -> dict[int, str]:
        """Where one stream of each local rank goes; starts copying those that are shown."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog

        streams = {local_rank: str(path) for local_rank, path in paths.items()}
        if self._show == "first" and console.isatty():
            return streams | {0: self._open_terminal(console, local[0])}
        show_all = self._show == "all"
        prefixes = {each: f"[rank {files.rank}] " if show_all else "" for each, files in local.items()}
        followed = streams if show_all else {0: streams[0]}
        self._tails.append(TailLog("rank", followed, console, prefixes).start())
        return streams

    def _open_terminal(self, console: TextIO, files: RankFiles) -> str:
        if self._mirror is None:
            try:
                self._mirror = TerminalMirror(console.fileno(), files.screen)
            except OSError:  # no pseudo-terminal available: the rank gets the real terminal, and no log file
                return ""
            self._mirror.start()
        return self._mirror.path


class TerminalMirror(threading.Thread):
    """Gives a rank a pseudo-terminal and copies its output to the real terminal and to a file."""

    def __init__(self, screen: int, log: Path) -> None:
        super().__init__(name="samestep-mirror", daemon=True)
        self._screen, self._screen_is_open = screen, True
        self._master, self._slave = pty.openpty()
        tty.setraw(self._slave)  # the real terminal translates line ends already
        self.path = os.ttyname(self._slave)
        self._log = log.open("wb", buffering=0)
        self._closing = threading.Event()
        self._copy_size()

    def run(self) -> None:
        """Copy until closed and nothing is left to read."""
        while True:
            closing = self._closing.is_set()
            ready, _, _ = select.select([self._master], [], [], 0.0 if closing else 0.2)
            if ready:
                self._copy(os.read(self._master, _CHUNK))
            elif closing:
                return
            else:
                self._copy_size()

    def close(self) -> None:
        """Copy what is left, then close the pseudo-terminal."""
        self._closing.set()
        self.join()
        self._log.close()
        os.close(self._master)
        os.close(self._slave)

    def _copy(self, data: bytes) -> None:
        self._log.write(data)
        try:
            while data and self._screen_is_open:
                data = data[os.write(self._screen, data) :]
        except OSError:  # the terminal was closed; under nohup the ranks continue, and so does their log
            self._screen_is_open = False

    def _copy_size(self) -> None:
        try:
            size = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, bytes(8))
        except OSError:  # the terminal was closed
            return
        if size != fcntl.ioctl(self._slave, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)
