"""TensorBoard: the curves of a run in a browser, where tensorboard is installed."""

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.loggers.jsonl import AppendedFile, Tell

# A kill costs what was not yet written.
_FLUSH_SECONDS = 10.0
_FORMAT = "brain.Event:2"
Encode = Callable[[int | None, Mapping[str, float]], bytes]


class TensorBoardSink:
    """A sink that adds each number to an event file.

    Event files cannot be rewritten: after a restart from an older checkpoint a curve shows the repeated steps twice.
    tensorboard's own writer is not used: a full disk ends the thread of it, with a traceback that nobody can catch.
    """

    def __init__(self, file: AppendedFile, encode: Encode) -> None:
        self._file, self._encode = file, encode
        self._pending = [encode(None, {})]
        self._since = 0.0  # the first record is written at once

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to the curve of each name; all in one event, which costs a third of one event each."""
        self._pending.append(self._encode(step, values))
        if time.monotonic() - self._since >= _FLUSH_SECONDS:
            self._since = time.monotonic()
            self._file.append(b"".join(self._pending))
            self._pending = []

    def close(self, summary: Mapping[str, object]) -> None:
        """Write what is still held back; the summary has a file of its own."""
        del summary
        self._file.close(b"".join(self._pending))


def open_tensorboard(folder: Path, warn: Tell, say: Tell | None = None) -> TensorBoardSink | None:
    """A sink for `folder`, or None after a warning where tensorboard cannot be imported."""
    try:
        import tensorboard  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch's message for its absence is less clear
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        warn(f"TensorBoard curves are left out ({error}): to have them, pip install 'samestep[tensorboard]'")
        return None

    def encode(step: int | None, values: Mapping[str, float]) -> bytes:
        """All numbers of a record in one event; without a step, the event that a file begins with."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        told = {"file_version": _FORMAT} if step is None else {"step": step, "summary": Summary(value=points)}
        written = io.BytesIO()
        RecordWriter(written).write(Event(wall_time=time.time(), **told).SerializeToString())
        return written.getvalue()

    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
    return TensorBoardSink(AppendedFile(folder / name, warn, say, text=False), encode)
