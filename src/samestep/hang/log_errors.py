"""Why a rank failed, read from the end of its log: its exception, or that it lost or waited for another rank."""

import re
from collections.abc import Sequence
from itertools import takewhile

from samestep.hang.evidence import Frame, is_user_code, user_frame

_TRACEBACK = re.compile(r'File "(.+)", line (\d+)(,?) in (.+)')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_MESSAGE_LINES = 3  # of an exception; more is what the rank has printed since

# Messages of a rank whose connection to another rank broke. The other rank's failure is the cause.
_LOST_PEER = (
    "Socket Timeout",
    "DistNetworkError",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "NCCL communicator was aborted",
    "connectFullMesh failed",
    "samestep.errors.RankMissing",
)
# The same, but an upload or a database may raise them too: they count only if torch.distributed has raised them.
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")
_BACKEND = re.compile(r"\.(cc|cpp):\d+\b|gloo|NCCL|c10d|SocketImpl|torch\.distributed|\bDist\w+Error")
_BACKEND_FILE = re.compile(r"/torch/distributed/(distributed_c10d|c10d_logger|rendezvous)\.py$")
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""torch adds it to each line of a traceback if there is a process group."""
NCCL_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout|failure detected by watchdog")
"""NCCL aborts a rank that has waited for another one for longer than the timeout."""
GLOO_MISMATCH = re.compile(r"Received data size doesn't match expected|op\.preamble\.length <= op\.nbytes")
"""gloo aborts a rank that receives a message of another collective: some rank has called a wrong one."""
GLOO_TIMEOUT = re.compile(r"Timed out waiting \d+ ?ms|Application timeout caused pair closure")
"""gloo raises in a rank that has waited for another one for longer than the timeout."""
# torch raises in a rank that has waited for another one to connect, or in gloo's monitored_barrier, for too long.
_STORE_TIMEOUT = re.compile(
    r"[Tt]imed out after \d+ seconds waiting for clients|wait timeout after \d+ms|failed to pass monitoredBarrier"
)
_SAMESTEP_TIMEOUT = re.compile(r"RankMissing: rank \d+ (?:has waited at |.* since \d+ s: )")


def has_timed_out(log: str) -> bool:
    """Whether a traceback or the end of a log says that a rank had waited for another one until the timeout.

    The watchdog of NCCL writes before the stacks of Python; of all else only the message of the exception counts.
    """
    message = error_message(log)
    patterns = GLOO_TIMEOUT, _STORE_TIMEOUT, _SAMESTEP_TIMEOUT
    return bool(NCCL_WATCHDOG.search(log)) or any(pattern.search(message) for pattern in patterns)


def is_lost_peer(log: str) -> bool:
    """Whether a traceback ends in an error that only says that the connection to another rank broke.

    Only the message counts, not the frames above it: source lines may contain the same words.
    """
    message = error_message(log)
    if any(words in message for words in _LOST_PEER):
        return True
    if not any(words in message for words in _LOST_CONNECTION):
        return False
    frames = _TRACEBACK.findall(log)
    return bool(_BACKEND.search(message) or (frames and _BACKEND_FILE.search(frames[-1][0])))


def error_message(log: str) -> str:
    """The message of the last exception in the end of a log: what follows its traceback. Without one, all of it."""
    lines = RANK_PREFIX.sub("", log).splitlines()
    start = max((index for index, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return "\n".join(line for line in lines[start:] if not line.startswith("  "))


def raised_exception(lines: Sequence[str]) -> str:
    """The exception in the traceback at the end of a log, `ValueError: bad sample`; empty if there is none."""
    message = error_message("\n".join(lines)).splitlines()
    is_exception = 0 < len(message) <= _MESSAGE_LINES and _EXCEPTION.fullmatch(message[0])
    return message[0] if is_exception else ""


def traceback_frame(lines: Sequence[str]) -> Frame | None:
    """The innermost line of user code in the traceback at the end of a log, also of faulthandler; None without one."""
    found = [match for line in lines if (match := _TRACEBACK.search(line))][::-1]
    if found and not found[0][3]:  # of faulthandler, which writes the innermost line first
        found = list(takewhile(lambda match: not match[3], found))[::-1]
    frame = user_frame([Frame(match[1], int(match[2]), match[4]) for match in found])
    return frame if frame is not None and is_user_code(frame) else None
