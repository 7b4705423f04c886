"""A process as a rank: its random numbers at the start, the script until it ends, and how it has ended."""

import os
import random
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from samestep.verify.recorder.recorder import Recorder, StopScript

FAILED: Final = 1
_MAX_TRACEBACK: Final = 6000


def seed_differently() -> None:
    """Give the generators of a fork states of their own, as those of a new process."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()


def use_cores_of(ranks: int) -> None:
    """Let one rank that computes the global batch of several use as many cores as they do together."""
    import torch

    torch.set_num_threads(max(torch.get_num_threads(), min(ranks, len(os.sched_getaffinity(0)))))


def run_until_stopped(function: Callable[[], None]) -> tuple[int, BaseException | None]:
    """Run until the function returns, raises, or has made enough steps; returns an exit code and the exception."""
    try:
        function()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None), None
    except StopScript as stopped:
        return 0, stopped
    except BaseException as raised:  # noqa: BLE001 - reported as a finding
        return FAILED, raised
    return 0, None


def end(recorder: Recorder, code: int, error: BaseException | None) -> None:
    """Write how this rank has ended."""
    sys.settrace(None)
    if error is not None and not isinstance(error, StopScript):
        sys.stderr.write(format_error(recorder, error))
    is_stopped = isinstance(error, StopScript)
    recorder.write("end", code=code, stopped=is_stopped, **_describe(recorder, None if is_stopped else error))


def _describe(recorder: Recorder, error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {}
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_own(frame)]
    user = [(frame, line) for frame, line in frames if recorder.is_user_code(frame.f_code)]
    return {
        "error": type(error).__name__,
        "message": str(error)[:2000],
        "frames": [
            (recorder.original_path(frame.f_code.co_filename), line, frame.f_code.co_qualname)
            for frame, line in user[::-1][:12]
        ],
        "attribute": getattr(error, "name", None) if isinstance(error, AttributeError) else None,
        "owner": type(getattr(error, "obj", None)).__name__ if isinstance(error, AttributeError) else None,
        "traceback": format_error(recorder, error),
    }


def format_error(recorder: Recorder, error: BaseException) -> str:
    """The traceback as Python would print it without verify: without its frames, and with the user's paths."""
    summary = traceback.TracebackException.from_exception(error)
    for each in _chain(summary):
        kept = [frame for frame in each.stack if not _is_own_file(frame.filename)]
        for frame in kept:
            frame.filename = recorder.original_path(frame.filename)
        each.stack[:] = kept
    return "".join(summary.format())[-_MAX_TRACEBACK:]


def _chain(summary: traceback.TracebackException | None) -> list[traceback.TracebackException]:
    found = list[traceback.TracebackException]()
    while summary is not None and summary not in found:
        found.append(summary)
        summary = summary.__cause__ or summary.__context__
    return found


def _is_own(frame: FrameType) -> bool:
    return _is_own_file(frame.f_code.co_filename)


def _is_own_file(file: str) -> bool:
    return file.startswith(os.path.dirname(__file__)) or file == "<frozen runpy>"  # noqa: PTH120
