"""TensorBoard: the curves of a run in a browser, where tensorboard is installed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

# A kill costs what was not yet written; the default of two minutes is much of a short run.
_FLUSH_SECONDS = 10


class TensorBoardSink:
    """A sink that adds each number to an event file in `folder`.

    Event files cannot be rewritten: after a restart from an older checkpoint a curve shows the repeated steps twice.
    """

    def __init__(self, writer: "FileWriter", make_summary: Callable[[Mapping[str, float]], object]) -> None:
        self._writer, self._make_summary = writer, make_summary

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to the curve of each name; all in one event, which costs a third of one event each."""
        self._writer.add_summary(self._make_summary(values), step)

    def close(self, summary: Mapping[str, object]) -> None:
        """Write what is still held back; the summary has a file of its own."""
        del summary
        self._writer.close()


def open_tensorboard(folder: Path, warn: Callable[[str], None]) -> TensorBoardSink | None:
    """A sink for `folder`, or None after a warning where tensorboard cannot be imported."""
    try:
        import tensorboard  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch's message for its absence is less clear
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from torch.utils.tensorboard import FileWriter
    except ImportError as error:
        warn(f"TensorBoard curves are left out ({error}): to have them, pip install 'samestep[tensorboard]'")
        return None

    def make_summary(values: Mapping[str, float]) -> object:
        """All numbers of a record in one event."""
        return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    return TensorBoardSink(FileWriter(str(folder), flush_secs=_FLUSH_SECONDS), make_summary)
