"""log.txt: the story of a run for people to read."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.log import warn as give_warning
from samestep.sinks.appended import AppendedFile, Tell
from samestep.sinks.readable import line, plain


class TextLog:
    """A sink that writes each record and everything said on a line with its time; a file that exists is continued."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, warn: Tell = give_warning, say: Tell | None = None
    ) -> None:
        self._clock = clock
        self._file = AppendedFile(path, warn, say)
        self._closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        self.say(line(step, values))

    def say(self, text: str) -> None:
        """Append text; lines after its first are set in beneath it."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        lines = f"{stamp}  " + text.replace("\n", f"\n{' ' * len(stamp)}  ") + "\n"
        # Paths may hold bytes that are no UTF-8: they must not end a run.
        self._file.append(lines.encode(errors="backslashreplace"))

    def close(self, summary: Mapping[str, object]) -> None:
        """Append the summary and close the file."""
        if self._closed:
            return
        self._closed = True
        if summary:
            self.say("\n".join(("summary", *(f"{name} {_text(value)}" for name, value in sorted(summary.items())))))
        self._file.close()


def _text(value: object) -> str:
    return plain(value) if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
