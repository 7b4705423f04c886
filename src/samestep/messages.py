"""Messages of the library: filterable warnings, the logger "samestep", and numbers that people read or write."""

import inspect
import logging
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType

_PACKAGE = "samestep"
_MAX_DIGITS = 18  # of a 64-bit integer; int() refuses to read thousands of digits
_LONGEST_VALUE = 60  # characters of a value that an error shows
# not max_tokens, tokenizer and keypoints
_SECRET = re.compile(r"(?i)(keys?|token|(secret|password|passwd|credential)s?)(?![a-z])")
_HIDDEN = "***"
_CONTROL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def plain_text(text: str) -> str:
    r"""The text without the colors of terminals and without control characters; line breaks and tabs stay.

    >>> plain_text("\x1b[31mred\x1b[0m")
    'red'
    """
    return _CONTROL_CODE.sub("", text)


class SamestepWarning(UserWarning):
    """The category of all warnings of samestep; filter it with `warnings.filterwarnings`."""


def warn(text: str) -> None:
    """Issue a SamestepWarning that points at the caller's line outside of samestep."""
    # `skip_file_prefixes` does this from Python 3.12 on.
    level, frame = 1, inspect.currentframe()
    while frame is not None and _is_internal(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SamestepWarning, stacklevel=level)


def calling_frame(skipped: tuple[str, ...]) -> FrameType:
    """The nearest frame on the stack whose file has none of these prefixes, or the outermost frame."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack reads source files: far too slow
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame


class WarnOnce:
    """Issues each warning once per instance.

    >>> once = WarnOnce()
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     once.warn_once("two ranks share a GPU")
    ...     once.warn_once("two ranks share a GPU")
    >>> len(caught)
    1
    """

    def __init__(self) -> None:
        self._issued: set[str] = set()

    def warn_once(self, text: str, subject: str = "") -> None:
        """Warn, unless this instance has issued the same text before, or another one of the same `subject`."""
        if (subject or text) not in self._issued:
            self._issued.add(subject or text)
            warn(text)


def info(text: str) -> None:
    """Log a message that needs no action to the logger "samestep"."""
    logging.getLogger(_PACKAGE).info(text)


@contextmanager
def info_to(write: Callable[[str], None]) -> Generator[None]:
    """Pass every `info` message to `write` inside the block, instead of to the handlers of the root logger.

    Only a program uses this (the command line, a Run): you could not silence a library that prints by itself.
    """
    logger = logging.getLogger(_PACKAGE)
    handler, level, propagate = logging.Handler(), logger.level, logger.propagate
    handler.emit = lambda record: write(record.getMessage())  # the text without level or name
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.propagate = False  # the root logger's handlers would print each message a second time
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _is_internal(module_globals: dict[str, object]) -> bool:
    # contextlib's frames are between ours when an ExitStack closes things
    return str(module_globals.get("__name__", "")).partition(".")[0] in (_PACKAGE, "contextlib")


def format_bytes(count: float) -> str:
    """Format an amount of memory in the largest unit of which there is at least one.

    >>> format_bytes(1.25 * 2**30), format_bytes(64 * 2**20)
    ('1.2 GiB', '64.0 MiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_list(items: Sequence[object], shown: int) -> str:
    """The first items in one line, and how many more there are.

    >>> format_list([1, 2, 3, 4], 2)
    '1, 2 and 2 more'
    """
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more


def format_duration(seconds: float) -> str:
    """Format a time span as hours, minutes and seconds.

    >>> format_duration(83.4), format_duration(90061)
    ('1:23', '25:01:01')
    """
    total = round(seconds)
    hours, minutes, seconds_left = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def format_span(seconds: float) -> str:
    """Format a time span with its two largest units, for text.

    >>> format_span(83.4), format_span(7500), format_span(200_000), format_span(0.042)
    ('1 min 23 s', '2 h 5 min', '2 d 7 h', '42 ms')
    """
    if seconds < 9.5:
        return f"{seconds:.1f} s" if seconds >= 1 else format_seconds(seconds) if seconds else "0 s"
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def format_seconds(seconds: float) -> str:
    """Format a short time with three digits.

    >>> format_seconds(0.01234), format_seconds(2.5), format_seconds(1234.5)
    ('12.3 ms', '2.50 s', '1,234 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"


def read_integer(text: str) -> int | None:
    """A non-negative integer of at most 18 digits, or None if the text is something else.

    >>> read_integer(" 12 "), read_integer("-1"), read_integer("9" * 5000)
    (12, None, None)
    """
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def shorten(text: str) -> str:
    """A value as a shell would quote it, without the end of a very long one; what is not UTF-8 is escaped."""
    text = text.encode(errors="backslashreplace").decode()
    return shlex.quote(text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}...")


def is_secret(name: str) -> bool:
    """Whether the value of an option or a variable of this name must not be shown to others.

    >>> is_secret("--wandb-api-key"), is_secret("max_tokens")
    (True, False)
    """
    return bool(_SECRET.search(name))


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line that can be shown to others: values of options such as --api-key are hidden.

    >>> hide_secrets(["train.py", "--api-key", "a1b2", "--lr", "0.1", "--token=c3"])
    ['train.py', '--api-key', '***', '--lr', '0.1', '--token=***']
    """
    shown, hide_next = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        hides = is_secret(name) and (name.startswith("-") or bool(equals))
        if hide_next and not argument.startswith("-"):
            argument = _HIDDEN
        elif hides and equals:
            argument = f"{name}={_HIDDEN}"
        shown.append(argument)
        hide_next = hides and not equals
    return shown
