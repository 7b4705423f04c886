"""Python warnings while a run is open: each text once per line of code, on rank 0, and a count of the repetitions."""

import os
import time
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, TextIO

import torch.distributed as dist

from samestep.distributed.communicator import Communicator
from samestep.distributed.rank_status import poll_pause
from samestep.messages import format_list

# A rank waits this long for rank 0 to report the same warning: ranks run the same code at about the same time.
_WAIT_SECONDS: Final = 0.5
_KEPT: Final = 64  # warnings in the store: a text with a number in it is a new one every time
_SHOWN: Final = 4


class RankWarnings:
    """Shows a warning the first time that a run meets it.

    Python forgets which warnings it has shown whenever a library changes the filters, so that some come again in every
    epoch, and every rank shows its own. Filters are not touched: what they ignore or turn into errors does not arrive
    here. Other ranks show what rank 0 did not meet.
    """

    def __init__(self, comm: Communicator, record: Callable[[str, str, str, int], None]) -> None:
        self._rank, self._record = comm.world.rank, record
        self._store = None if comm.alone else dist.PrefixStore("warnings", comm.store)
        self._show = warnings.showwarning  # may be that of `logging.captureWarnings`
        self._process = os.getpid()
        self._counts: Counter[tuple[str, str, str, int]] = Counter()
        self._posted: deque[str] = deque()  # what rank 0 has shown last
        self.closed = False

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Take the place of `warnings.showwarning`."""
        key = str(message), category.__name__, filename, lineno
        if not self.closed:
            self._counts[key] += 1
            if self._counts[key] > 1 or self._rank0_shows(repr(key)):
                return
            self._record(*key)
        self._show(message, category, filename, lineno, file, line)

    def format_repetitions(self) -> str:
        """A line about the warnings that came again; empty if there are none."""
        repeated = {key: count - 1 for key, count in self._counts.items() if count > 1}
        if not repeated:
            return ""
        places = [
            f"{category} at {filename}:{line} ({count:,} more)"
            for (_, category, filename, line), count in repeated.items()
        ]
        return f"repeated warnings, shown once: {format_list(places, _SHOWN)}"

    def _rank0_shows(self, key: str) -> bool:
        """Whether this is another rank than 0, and rank 0 shows the same warning."""
        if self._store is None or os.getpid() != self._process:  # a forked data worker must not use the connection
            return False
        name = f"{zlib.crc32(key.encode()):08x}"
        try:
            if not self._rank:
                self._store.set(name, "")
                self._posted.append(name)
                if len(self._posted) > _KEPT:
                    self._store.delete_key(self._posted.popleft())
                return False
            since = time.monotonic()
            while not (shown := self._store.check([name])) and time.monotonic() - since < _WAIT_SECONDS:
                time.sleep(poll_pause(since))
        except RuntimeError:  # the store exited with the rank that hosted it
            return False
        return shown


@contextmanager
def show_once(
    comm: Communicator, report: Callable[[str], None], record: Callable[[str, str, str, int], None]
) -> Generator[None]:
    """Show each warning once inside the block; at its end, report how often others came again.

    `record` gets what is shown on rank 0: text, category, file and line.
    """
    shown = RankWarnings(comm, record)
    before, warnings.showwarning = warnings.showwarning, shown.show
    try:
        yield
    finally:
        shown.closed = True  # a `catch_warnings` that ends later puts it back
        if warnings.showwarning == shown.show:
            warnings.showwarning = before
        if text := shown.format_repetitions():
            report(text)
