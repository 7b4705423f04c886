"""Which files a rank opens, renames and removes; and files that differ between ranks, to make hidden faults visible.

A correct script does not depend on the order in which a folder lists its files, nor on how long rank 0 takes to write
one. So every second rank lists folders in reverse, rank 0 waits a moment before it writes, and every rank before it
removes a file or creates a folder.
"""

import fcntl
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from samestep.verify.recorder.fingerprints import is_part, leaves
from samestep.verify.recorder.recorder import Recorder, wrap

EVENTS: Final = "events.out.tfevents"  # how the names of TensorBoard's files begin
_WRITE_DELAY: Final = 0.25  # seconds, for the first write to a path
_MAX_DELAYS: Final = 8
_MAX_CHANGES: Final = 4  # removals and new folders that are delayed as well
_MAX_FOUND: Final = 4000
_IGNORED = re.compile(
    r"/__pycache__/|\.pyc(\.\d+)?$|^/(dev|proc|sys)/|/\.cache/|/torchinductor_|/\.triton/|/matplotlib/"
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_CHANGES: Final = os.O_CREAT | os.O_TRUNC | os.O_APPEND


class FileObserver:
    """Follows the files that user code opens, directly or through a library."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._delayed = set[str]()
        self._is_busy = False
        self._found = 0
        self._missed = set[str]()  # paths at which this rank has found no file
        self._changes = 0

    def install(self) -> None:
        """Observe files from now on, and list folders in another order on every second rank."""
        sys.addaudithook(self._hook)
        wrap(torch, "save", self._save)  # it opens files in C++
        for name in ("flock", "lockf"):
            wrap(fcntl, name, self._lock)
        for owner, name in ((os.path, "exists"), (os.path, "isfile"), (Path, "exists"), (Path, "is_file")):
            wrap(owner, name, self._exists)
        if (self._recorder.rank or 0) % 2:
            self._reverse_listings()

    def _save(self, original: Any, value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and not self._recorder.is_quiet:
            with self._recorder.quiet():
                self._write("write", file)
                parts = sum(is_part(each) for each in leaves(value))
            if parts:
                self._recorder.write("saved_parts", site=self._recorder.site(), tensors=parts, path=os.fspath(file))
        return original(value, file, *args, **kwargs)

    def _lock(self, original: Any, file: Any, operation: int, *args: Any, **kwargs: Any) -> Any:
        """Note that a file is locked once it is, and that it is not any more before it is unlocked."""
        recorder = self._recorder
        if recorder.is_quiet:
            return original(file, operation, *args, **kwargs)
        path = recorder.original_path(_path_of(file))
        if operation & fcntl.LOCK_UN:
            recorder.write("lock", path=path, held=False)
        result = original(file, operation, *args, **kwargs)
        if not operation & fcntl.LOCK_UN:
            recorder.write("lock", path=path, held=True)
        return result

    def _exists(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Note that this rank has found a file, for which it may have waited, or has looked for one and found none."""
        recorder = self._recorder
        if recorder.is_quiet or not isinstance(path, str | os.PathLike):
            return original(path, *args, **kwargs)
        with recorder.quiet():
            found = original(path, *args, **kwargs)
            name = os.path.abspath(path)  # noqa: PTH100
        if name.startswith(recorder.settings.mirror[0]) and (found or name not in self._missed):
            if self._found < _MAX_FOUND:
                self._found += 1
                recorder.write("exists", path=recorder.original_path(name), found=found, site=recorder.site())
            (self._missed.discard if found else self._missed.add)(name)
        return found

    def observe_hdf5(self, module: Any) -> None:
        """Observe files of h5py, which opens them in C."""

        def create(original: Any, file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(name, str | os.PathLike) and not self._recorder.is_quiet:
                with self._recorder.quiet():
                    self._write("read" if mode == "r" else "write", name)
            return original(file, name, mode, *args, **kwargs)

        wrap(module.File, "__init__", create)

    def observe_tensorboard(self, module: Any) -> None:
        """Observe the writers of TensorBoard, whose threads open a file per process in a folder."""

        def create(original: Any, writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(logdir, str | os.PathLike) and not self._recorder.is_quiet:
                with self._recorder.quiet():
                    self._write("write", f"{os.fspath(logdir)}/{EVENTS}")
            return original(writer, logdir, *args, **kwargs)

        wrap(module.EventFileWriter, "__init__", create)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            event not in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree", "sqlite3.connect")
            or self._is_busy
            or self._recorder.is_quiet
        ):
            return
        self._is_busy = True  # what follows may open files itself
        try:
            with self._recorder.quiet():
                self._observe(event, args)
        finally:
            self._is_busy = False

    def _observe(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename":
            self._write("rename", args[1])
        elif event == "sqlite3.connect":
            self._write("update", args[0])  # SQLite locks what it writes
        elif event in ("os.remove", "os.mkdir", "shutil.rmtree"):
            self._write(event.rpartition(".")[2], args[0])
        elif isinstance(args[0], str | bytes | os.PathLike):
            mode, flags = args[1] if isinstance(args[1], str) else "", args[2] or 0
            writes = any(letter in mode for letter in "wax") if mode else bool(flags & _WRITES and flags & _CHANGES)
            updates = "+" in mode if mode else bool(flags & _WRITES)
            exclusive = "x" in mode or bool(flags & os.O_EXCL)
            self._write("write" if writes else "update" if updates else "read", args[0], exclusive)

    def _write(self, action: str, path: Any, exclusive: bool = False) -> None:
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if _IGNORED.search(name):
            return
        recorder = self._recorder
        if not recorder.user_frames(sys._getframe(2)):  # pyright: ignore[reportPrivateUsage]
            return
        if action in ("write", "update"):
            self._detach(Path(name))
        if action == "read" and (not name.startswith(recorder.settings.mirror[0] or "/") or name.endswith(".py")):
            return
        event = {
            "action": action, "path": recorder.original_path(name), "exclusive": exclusive, "site": recorder.site(2),
        }  # fmt: skip
        if recorder.settings.world != "one":
            if action in ("write", "rename") and recorder.rank == 0:
                self._delay(name, event)
            elif self._changes < _MAX_CHANGES and (
                action == "remove" or (action == "mkdir" and not Path(name).exists())
            ):
                self._changes += 1
                time.sleep(_WRITE_DELAY)  # all ranks have looked for it before one of them removes or creates it
        recorder.write("file", **event)

    def _delay(self, name: str, event: dict[str, Any]) -> None:
        if name not in self._delayed and len(self._delayed) < _MAX_DELAYS:
            self._delayed.add(name)
            self._recorder.write("delayed_file", **event)  # this rank may be ended before it writes
            time.sleep(_WRITE_DELAY)

    def _detach(self, path: Path) -> None:
        """Replace a link of the mirror by a copy, so that the script does not write to the user's file.

        Only one rank does, and the path is never missing.
        """
        if not path.is_symlink():
            return
        folder = self._recorder.settings.folder
        with open(f"{folder}/detach.lock", "w") as lock:  # noqa: PTH123
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_symlink():  # another rank was first
                return
            target = path.resolve()
            if target.is_file():
                copy = path.with_name(f"{path.name}.{os.getpid()}.copy")
                shutil.copy2(target, copy)
                copy.replace(path)
            else:
                path.unlink()

    def _reverse_listings(self) -> None:
        listdir, scandir = os.listdir, os.scandir

        def reversed_listdir(*args: Any) -> Any:
            return sorted(listdir(*args), reverse=True)

        os.listdir = reversed_listdir
        os.scandir = lambda *args: _ReversedEntries(scandir(*args))  # pyright: ignore


def _path_of(file: Any) -> str:
    """The path of an open file, by its object or its descriptor."""
    number = file if isinstance(file, int) else file.fileno()
    try:
        return str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:  # not on Linux
        return str(getattr(file, "name", number))


class _ReversedEntries:
    """The entries of os.scandir, from the last name to the first."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self._sorted: Any = None

    def __iter__(self) -> "_ReversedEntries":
        return self

    def __next__(self) -> Any:
        if self._sorted is None:
            self._sorted = iter(sorted(self._entries, key=lambda entry: entry.name, reverse=True))
        return next(self._sorted)

    def __enter__(self) -> "_ReversedEntries":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        self._entries.close()
