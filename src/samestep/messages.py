"""How the library itself speaks: warnings that can be filtered, and notes on the logger "samestep"."""

import inspect
import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager


def format_bytes(count: float) -> str:
    """An amount of memory in the largest unit that leaves at least one.

    >>> bytes_text(1.25 * 2**30), bytes_text(64 * 2**20)
    ('1.2 GiB', '64.0 MiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """A time span as hours, minutes and seconds.

    >>> duration(83.4), duration(90061)
    ('1:23', '25:01:01')
    """
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """A short time with three digits.

    >>> seconds_text(0.01234), seconds_text(2.5), seconds_text(1234.5)
    ('12.3 ms', '2.50 s', '1,234 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"


_PACKAGE = "samestep"


class SamestepWarning(UserWarning):
    """Something the user should know and may silence with `warnings.filterwarnings`."""


class WarnOnce:
    """Warnings that are given once each; whoever warns keeps one, so nothing is remembered beyond its life.

    >>> voice = Voice()
    >>> with warnings.catch_warnings(record=True) as given:
    ...     warnings.simplefilter("always")
    ...     voice.warn_once("two ranks share a GPU")
    ...     voice.warn_once("two ranks share a GPU")
    >>> len(given)
    1
    """

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn_once(self, text: str) -> None:
        """Warn, unless this voice has given the same text before."""
        if text not in self._said:
            self._said.add(text)
            warn(text)


def warn(text: str) -> None:
    """Give a SamestepWarning that points at the caller's own line, however deep in the library it arose."""
    # `skip_file_prefixes` would do this, but came with Python 3.12.
    level, frame = 1, inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SamestepWarning, stacklevel=level)


def info(text: str) -> None:
    """Tell something that needs no action; heard where `info_to` or the user's own logging listens."""
    logging.getLogger(_PACKAGE).info(text)


@contextmanager
def info_to(write: Callable[[str], None]) -> Generator[None]:
    """Hand every note to `write` while the block lasts, instead of to the handlers of the root logger.

    Only a program installs this (the command line, a Run): a library that prints by itself cannot be silenced.
    """
    logger = logging.getLogger(_PACKAGE)
    listener, level, propagate = _Listener(write), logger.level, logger.propagate
    logger.addHandler(listener)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    # The root logger's handlers would say each note a second time.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


class _Listener(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over the text alone."""
        self._write(record.getMessage())


def _is_ours(names: dict[str, object]) -> bool:
    # contextlib stands between us and ourselves where things are closed one after the other
    return str(names.get("__name__", "")).partition(".")[0] in (_PACKAGE, "contextlib")
