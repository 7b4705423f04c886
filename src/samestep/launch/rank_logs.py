"""Where each rank's output goes: its own files in the run's folder, and for some ranks the console too."""

import fcntl
import logging
import os
import pty
import select
import sys
import termios
import threading
import tty
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from samestep.errors import LaunchError
from samestep.launch.job import Show

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

_CHUNK = 1 << 16


class Mirror(threading.Thread):
    """Copies one pseudo-terminal to a screen and to a file, until closed."""

    def __init__(self, screen: int, log: Path) -> None:
        super().__init__(name="samestep-mirror", daemon=True)
        self._screen, self._screen_is_there = screen, True
        self._inner, self._outer = pty.openpty()
        tty.setraw(self._outer)  # the real terminal translates line ends; twice would be once too often
        self.path = os.ttyname(self._outer)
        self._log = log.open("wb", buffering=0)
        self._ending = threading.Event()
        self._copy_size()

    def run(self) -> None:
        """Copy until closed and nothing is left to read."""
        while True:
            ending = self._ending.is_set()
            ready, _, _ = select.select([self._inner], [], [], 0.0 if ending else 0.2)
            if ready:
                self._copy(os.read(self._inner, _CHUNK))
            elif ending:
                return
            else:
                self._copy_size()

    def close(self) -> None:
        """Copy what is still on its way, then give the pseudo-terminal back."""
        self._ending.set()
        self.join()
        self._log.close()
        os.close(self._inner)
        os.close(self._outer)

    def _copy(self, data: bytes) -> None:
        self._log.write(data)
        try:
            while data and self._screen_is_there:
                data = data[os.write(self._screen, data) :]
        except OSError:  # the terminal was closed; under nohup the ranks go on, and their log with them
            self._screen_is_there = False

    def _copy_size(self) -> None:
        try:
            size = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, bytes(8))
        except OSError:  # closed, as above
            return
        if size != fcntl.ioctl(self._outer, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(self._outer, termios.TIOCSWINSZ, size)


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in one attempt."""

    folder: Path
    """Where they lie: the attempt's folder."""
    rank: int
    """Its number among all ranks."""

    @property
    def out(self) -> Path:
        """What it printed on stdout."""
        return self.folder / f"rank-{self.rank}.out"

    @property
    def err(self) -> Path:
        """What it printed on stderr."""
        return self.folder / f"rank-{self.rank}.err"

    @property
    def screen(self) -> Path:
        """What it printed on its terminal, where it has one."""
        return self.folder / f"rank-{self.rank}.log"

    @property
    def error(self) -> Path:
        """The exception that ended it, in torch's form, where it wrote one."""
        return self.folder / f"rank-{self.rank}.error.json"

    def set_aside(self) -> None:
        """Keep the files of an earlier run or attempt of the same name, by another name."""
        for path in (self.out, self.err, self.screen, self.error):
            if path.exists():
                taken = sum(1 for _ in self.folder.glob(f"{path.name}.*"))
                path.rename(path.with_name(f"{path.name}.{taken + 1}"))


@dataclass(frozen=True)
class Streams:
    """Paths of one attempt's output by local rank, in torch's terms; an empty path is the launcher's own stream."""

    stdouts: dict[int, str]
    """Where stdout goes."""
    stderrs: dict[int, str]
    """Where stderr goes."""
    error_files: dict[int, str]
    """Where a rank may write the exception that ended it."""


class AgentLog(logging.FileHandler):
    """A file for what torch's agent says, of which a disk that is full loses a part, and no more is said of that."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        """Pass over it: logging would print a stack of its own for every record."""


class RankLogs:
    """Opens the files of each attempt, and shows the console what was asked for while the ranks write them."""

    def __init__(self, folder: Path, show: Show) -> None:
        self.folder = folder
        self.files: dict[int, RankFiles] = {}
        self._shown: RankFiles | None = None
        self._show: Show = show
        self._mirror: Mirror | None = None
        self._tails: list[TailLog] = []

    def open_agents(self, host: str) -> AgentLog:
        """The file for what torch's agent says on this host; makes the folder."""
        with self._writing():
            self.folder.mkdir(exist_ok=True)
            return AgentLog(self.folder / f"launcher-{host}.log")

    def open(self, envs: Mapping[int, Mapping[str, str]]) -> Streams:
        """Prepare an attempt, whose ranks are given by their variables; an attempt before it is closed."""
        self.close()
        attempt = self.folder / f"attempt-{envs[0]['TORCHELASTIC_RESTART_COUNT']}"
        local = {local_rank: RankFiles(attempt, int(env["RANK"])) for local_rank, env in envs.items()}
        self.files = {files.rank: files for files in local.values()}
        self._shown = local[0] if self._show == "first" else None
        with self._writing():
            attempt.mkdir(parents=True, exist_ok=True)
            for files in local.values():
                files.set_aside()
            return Streams(
                stdouts=self._connect({each: files.out for each, files in local.items()}, sys.stdout, local),
                stderrs=self._connect({each: files.err for each, files in local.items()}, sys.stderr, local),
                error_files={each: str(files.error) for each, files in local.items()},
            )

    def has_shown(self, rank: int) -> bool:
        """Whether all that a rank printed stands where the launcher's own words go, and as it is."""
        files = self._shown
        if files is None or files.rank != rank:
            return False
        printed = [path for path in (files.screen, files.out, files.err) if path.exists()]
        return printed == [files.screen] or [path for path in printed if path.stat().st_size] == [files.err]

    def close(self) -> None:
        """Show what has been written up to now, then stop following."""
        for tail in self._tails:
            tail.stop()
        self._tails = []
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"what the ranks print cannot be kept in {self.folder} ({error.strerror}): name another --folder"
            ) from error

    def _connect(self, paths: dict[int, Path], console: TextIO, local: dict[int, RankFiles]) -> dict[int, str]:
        """Where one stream of each local rank goes, with those that are shown joined to the console."""
        streams = {each: str(path) for each, path in paths.items()}
        if self._show == "first" and console.isatty():
            return streams | {0: self._terminal(console, local[0])}
        prefixes = {each: f"[rank {files.rank}] " if self._show == "all" else "" for each, files in local.items()}
        self._follow(streams if self._show == "all" else {0: streams[0]}, console, prefixes)
        return streams

    def _terminal(self, console: TextIO, files: RankFiles) -> str:
        if self._mirror is None:
            try:
                self._mirror = Mirror(console.fileno(), files.screen)
            except OSError:  # no pseudo-terminal to be had: the rank gets the real one, and no log of its own
                return ""
            self._mirror.start()
        return self._mirror.path

    def _follow(self, paths: dict[int, str], console: TextIO, prefixes: dict[int, str]) -> None:
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog

        self._tails.append(TailLog("rank", paths, console, prefixes).start())
