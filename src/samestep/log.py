"""How the library itself speaks: warnings that can be filtered, and notes on the logger "samestep"."""

import inspect
import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager

_PACKAGE = "samestep"


class SamestepWarning(UserWarning):
    """Something the user should know and may silence with `warnings.filterwarnings`."""


class Voice:
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


def note(text: str) -> None:
    """Tell something that needs no action; heard where `notes_to` or the user's own logging listens."""
    logging.getLogger(_PACKAGE).info(text)


@contextmanager
def notes_to(write: Callable[[str], None]) -> Generator[None]:
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
