"""The Python stacks of a process that does not answer: faulthandler writes them at a signal to a file in memory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from samestep.hang import rank_probe
from samestep.hang.evidence import Frame

_FIRST_LINE_BYTES: Final = 4200  # a thread and a path, at most
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])?.*\(most recent call first\):")
_ONE_THREAD: Final = "Stack (most recent call first):"  # of the thread that got the signal: the main one, if it can
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")

Stacks = dict[str, list[Frame]]
"""Of each thread, the innermost frame first; the main thread is "main"."""


class StackFile:
    """The file in memory that faulthandler of a process writes to, found by the process's open files.

    Raises OSError or ValueError if the process has none, or would not write to it at the signal.
    """

    def __init__(self, pid: int) -> None:
        name = f"/memfd:{rank_probe.MEMORY_FILE}-{pid} (deleted)"
        self._path = next((each for each in open_files(pid) if str(each.readlink()) == name), None)
        handled = int(read_status(pid)["SigCgt"], 16)
        if self._path is None or not handled >> (rank_probe.SIGNAL - 1) & 1:
            raise ValueError(f"process {pid} does not write its stacks at a signal")
        with self._path.open("rb") as file:
            first_line = file.read(_FIRST_LINE_BYTES).partition(b"\n")[0]
            self._begin = file.seek(0, os.SEEK_END)
        self._main, _, self._folder = first_line.decode(errors="replace").partition(" ")
        self._text = ""
        self.stacks: Stacks = {}

    def read(self) -> bool:
        """Read what was written since; returns whether it is complete, so that two readings do not differ."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                text = file.read().decode(errors="replace")
        except OSError:  # the process has ended
            return True
        has_main = self._main.removeprefix("0x") in text or _ONE_THREAD in text  # it is padded with zeros
        is_complete = text == self._text and has_main and text.endswith("\n")
        self._text = text
        self.stacks = parse_stacks(text, self._main, self._folder)
        return is_complete


def parse_stacks(text: str, main: str = "", folder: str = "") -> Stacks:
    """The stacks in a text of faulthandler, without that of the probe itself.

    `main` is the main thread, as in the text, and `folder` is the one that relative file names are relative to.
    """
    stacks: Stacks = {}
    stack: list[Frame] | None = None
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            number, name = thread.groups()
            is_main = bool(main) and int(number, 16) == int(main, 16)
            stack = stacks.setdefault("main" if is_main else f"{name or 'thread'} {int(number, 16):#x}", [])
        elif line == _ONE_THREAD:
            stack = stacks.setdefault("main", [])
        elif not line.startswith("  "):  # the stack of C, and all else that is not a stack of Python
            stack = None
        elif (frame := _FRAME.fullmatch(line)) is not None and stack is not None:
            file, number, function = frame.groups()
            stack.append(Frame(absolute_path(_unescape(file), folder), int(number), _unescape(function)))
    return {name: stack for name, stack in stacks.items() if not _is_probe(stack)}


def _is_probe(stack: list[Frame]) -> bool:
    return any(Path(frame.file) == Path(rank_probe.__file__) for frame in stack)


def absolute_path(file: str, folder: str) -> str:
    """The path of a source file: relative ones are relative to the folder that the process started in.

    >>> absolute_path("train.py", "/home/me"), absolute_path("<string>", "/home/me")
    ('/home/me/train.py', '<string>')
    """
    return file if file.startswith(("/", "<")) or not folder else os.path.normpath(os.path.join(folder, file))  # noqa: PTH118


def _unescape(text: str) -> str:
    r"""Faulthandler writes characters that are not ASCII as escapes.

    >>> _unescape(r"caf\xe9.py")
    'café.py'
    """
    return _ESCAPE.sub(lambda match: chr(int(next(filter(None, match.groups())), 16)), text)


def open_files(pid: int) -> Iterator[Path]:
    """The open files of a process, as links in /proc."""
    return Path(f"/proc/{pid}/fd").iterdir()


def read_status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status by name; raises OSError if the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
