"""TensorBoard event files: the curves of a run in a browser, if tensorboard is installed."""

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.disk import AppendFile

_FLUSH_SECONDS = 10.0  # a kill loses at most the records of this time
_FORMAT = "brain.Event:2"


class TensorBoardLogger:
    """Logger that adds each value to an event file, at its step; the curve `epoch` has a point where an epoch begins.

    Event files cannot be rewritten: after a resume from an older checkpoint, a curve shows the repeated steps twice.
    tensorboard's own writer is not used: on a full disk its thread ends with a traceback that no caller can catch.
    """

    def __init__(self, file: AppendFile, encode: Callable[[int | None, Mapping[str, float]], bytes]) -> None:
        self._file, self._encode = file, encode
        self._pending = [encode(None, {})]
        self._epoch: int | None = None
        self._flushed_at = 0.0  # so that the first record is written immediately

    def write(
        self, step: int, values: Mapping[str, float], epoch: int | None = None, between_steps: bool = False
    ) -> None:
        """Add one point per name; one event for all of them costs a third of one event each."""
        if epoch is not None and epoch != self._epoch:
            self._epoch, values = epoch, {**values, "epoch": float(epoch)}
        self._pending.append(self._encode(step, values))
        if time.monotonic() - self._flushed_at >= _FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._file.append(b"".join(self._pending))
            self._pending = []

    def close(self, summary: Mapping[str, object]) -> None:
        """Write the pending events."""
        del summary  # it has its own file
        self._file.close(b"".join(self._pending))


def open_tensorboard(
    folder: Path, warn: Callable[[str], None], report: Callable[[str], None] | None = None
) -> TensorBoardLogger | None:
    """Open a logger for `folder`; if tensorboard cannot be imported, warn and return None."""
    try:
        import tensorboard  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch's message for its absence is less clear
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        warn(
            f"TensorBoard is not installed ({error}), so samestep writes no curves: pip install 'samestep[tensorboard]'"
        )
        return None

    def encode(step: int | None, values: Mapping[str, float]) -> bytes:
        """Encode a record as one event; without a step, the event that starts a file."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        fields = {"file_version": _FORMAT} if step is None else {"step": step, "summary": Summary(value=points)}
        written = io.BytesIO()
        RecordWriter(written).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return written.getvalue()

    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
    return TensorBoardLogger(AppendFile(folder / name, warn, report, is_text=False), encode)
