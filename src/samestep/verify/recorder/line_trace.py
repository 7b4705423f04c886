"""Which lines of user code a rank executes, in a ring of memory that survives its process.

The last lines of all ranks tell at which branch they took different ways, and where a rank is that does not answer.
"""

import builtins
import mmap
import struct
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from samestep.verify.recorder.recorder import Recorder, wrap

RING_ENTRIES: Final = 2**18
_HEADER: Final = 16
_LINE_BITS: Final = 20
_MAX_CODES: Final = 4096


class LineTrace:
    """Writes a number for every executed line: which function, and which line of it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.restart()

    def restart(self) -> None:
        """Write to a new ring, that of this process."""
        self._tracers: dict[CodeType, Any] = {}  # what traces the lines of a function; None for code of libraries
        name = f"rank-{self._recorder.rank}" if self._recorder.rank is not None else f"process-{self._recorder.pid}"
        with (Path(self._recorder.settings.folder) / f"{name}.lines").open("wb+") as file:
            file.truncate(_HEADER + 4 * RING_ENTRIES)
            self._map = mmap.mmap(file.fileno(), 0)
        self._ring = memoryview(self._map)[_HEADER:].cast("I")
        self._count = memoryview(self._map)[:8].cast("Q")
        self._position = self._traced = 0

    def install(self) -> None:
        """Trace the main thread from now on, except during imports, which would take several times as long."""
        self._recorder.positions = lambda: self._position
        wrap(builtins, "__import__", self._import)
        sys.settrace(self._enter)

    def _import(self, original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in sys.modules or sys.gettrace() is None:
            return original(name, *args, **kwargs)
        sys.settrace(None)
        try:
            return original(name, *args, **kwargs)
        finally:
            sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Called for every function, mostly of libraries: a step of a model calls thousands."""
        try:
            return self._tracers[frame.f_code]
        except KeyError:
            return self._add(frame.f_code)

    def _add(self, code: CodeType) -> Any:
        tracer = None
        if self._recorder.is_user_code(code) and self._traced < _MAX_CODES:
            tracer = self._trace_lines(self._traced)
            file = self._recorder.original_path(code.co_filename)
            self._recorder.write("code", id=self._traced, file=file, name=code.co_qualname, line=code.co_firstlineno)
            self._traced += 1
        self._tracers[code] = tracer
        return tracer

    def _trace_lines(self, number: int) -> Any:
        """A function that notes the lines of the function with this number."""
        base = number << _LINE_BITS

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                if self._tracers.get(frame.f_code) is not trace:  # of a frame that a fork has inherited
                    following = self._tracers.get(frame.f_code) or self._add(frame.f_code)
                    return following(frame, event, argument) if following is not None else None
                self._ring[self._position % RING_ENTRIES] = base | frame.f_lineno
                self._position += 1
                self._count[0] = self._position
            return trace

        return trace


def read_lines(path: Path) -> tuple[int, list[tuple[int, int]]]:
    """The number of lines that a rank has executed, and the last of them as (number of the function, line)."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("Q", data)
    values = memoryview(data)[_HEADER:].cast("I")
    first = max(0, count - RING_ENTRIES)
    numbers = (values[position % RING_ENTRIES] for position in range(first, count))
    return first, [(number >> _LINE_BITS, number & (1 << _LINE_BITS) - 1) for number in numbers]
