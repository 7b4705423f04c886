"""What a rank said last: its own traceback, found in the files it left."""

import json
import re
from pathlib import Path

from samestep.launch.logs import RankFiles

_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# torch puts the rank before each line of a traceback once a process group stands.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Messages of native code, such as the one about a process group that was not destroyed: true, but not the cause.
_NATIVE = re.compile(r"^\[[WEF]\d{3,4} [\d:.]+ .*\]|^\[rank\d+\]:\[[WEF]\d")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDED_EARLY = "EndedEarly"  # as samestep.run.preempt has it
_LONGEST = 200
_TAIL = 20


def last_words(files: RankFiles, crashed: bool) -> tuple[str, bool]:
    """What to show of a failed rank, and whether it is a traceback.

    The error file comes first, since it holds nothing else; then the last traceback of its log; then the log's end. A
    rank that crashed, which a signal shows, did not end by an exception: a traceback in its log is an older matter.
    """
    recorded = _recorded(files.error)
    if recorded:
        return recorded, True
    text = "\n".join(_lines(path) for path in (files.screen, files.out, files.err) if path.exists())
    lines = [line for line in text.splitlines() if not _NATIVE.match(line)]
    trace = None if crashed else last_traceback(lines)
    if trace:
        return "\n".join(trace), True
    return "\n".join([line for line in lines if line.strip()][-_TAIL:]), False


def last_traceback(lines: list[str]) -> list[str]:
    """The last traceback with the exceptions it grew from, to the end of the lines; empty where there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    headers = [at for at, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return []
    start = headers.pop()
    while headers and any(line.startswith(_CHAIN) for line in lines[headers[-1] : start]):
        start = headers.pop()
    trace = lines[start:]
    while trace and not trace[-1].strip():
        trace.pop()
    return trace if len(trace) <= _LONGEST else [*trace[: _LONGEST // 2], "  ...", *trace[-_LONGEST // 2 :]]


def recorded_message(files: RankFiles) -> str:
    """What a rank that was told to end has to say, from its error file; empty where it said nothing."""
    try:
        kind, _, text = str(json.loads(files.error.read_text())["message"]["message"]).partition(": ")
    except (OSError, ValueError, KeyError, TypeError):  # a script without a Run writes none
        return ""
    return text if kind == _ENDED_EARLY else ""


def _recorded(path: Path) -> str:
    """The traceback in an error file as torch writes it; empty where there is none."""
    try:
        message = json.loads(path.read_text())["message"]
        return str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message).rstrip()
    except (OSError, ValueError, KeyError, TypeError):  # none was written, or the rank died while writing it
        return ""


def _lines(path: Path) -> str:
    """A log's text as a person would have seen it; of a very long log only the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        text = file.read().decode(errors="replace")
    return _CONTROL.sub("", text.replace("\r\n", "\n"))
