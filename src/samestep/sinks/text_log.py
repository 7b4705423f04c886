"""log.txt: the story of a run for people to read."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from samestep.sinks.readable import line, plain


class TextLog:
    """A sink that writes each record and everything said on a line with its time; a file that exists is continued."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        # Paths may hold bytes that are no UTF-8: they must not end a run.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        self.say(line(step, values))

    def say(self, text: str) -> None:
        """Append text; lines after its first are set in beneath it."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        self._file.write(f"{stamp}  " + text.replace("\n", f"\n{' ' * len(stamp)}  ") + "\n")

    def close(self, summary: Mapping[str, object]) -> None:
        """Append the summary and close the file."""
        if self._file.closed:
            return
        if summary:
            self.say("\n".join(("summary", *(f"{name} {_text(value)}" for name, value in sorted(summary.items())))))
        self._file.close()


def _text(value: object) -> str:
    return plain(value) if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
