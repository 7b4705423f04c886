"""The text of a hang: a summary of a few lines, and a report with the state, stacks and collectives of every rank."""

import linecache
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.hang.evidence import Collective, Frame, ProcessInfo, RankEvidence, user_frame
from samestep.hang.hang_cause import HangCause
from samestep.hang.rank_sentences import Sentence, describe_process
from samestep.hang.wait_graph import describe_call, format_ranks, main_stack

_SHOWN_COLLECTIVES = 8
_SHOWN_LOG_LINES = 20
_SHOWN_RANKS = 4
_SOURCE_LENGTH = 100
_MINUTES_FROM = 120  # seconds
_NO_CAUSE = "no rank waits for another one"
JSON_VERSION = 1


def format_summary(cause: HangCause) -> str:
    """Who holds up whom and for how long, where the ranks are, and what to do: a few lines without color codes."""
    lines = [f"samestep: {cause.headline}", *(f"  {_format_sentence(each)}" for each in cause.sentences)]
    if cause.timeout:
        waits = "the ranks wait" if len(cause.waiting) > 1 else f"{format_ranks(cause.waiting)} waits"
        lines.append(
            f"  {format_ranks(cause.culprits)} may still arrive: {waits} for up to {_format_time(cause.timeout)}"
        )
    return "\n".join([*lines, f"  what to do: {cause.remedy}"])


def format_report(cause: HangCause | None, evidence: Sequence[RankEvidence]) -> str:
    """The summary, then for every rank its state, the stacks of its threads and data workers, and its collectives."""
    ordered = sorted(evidence, key=lambda each: each.rank)
    ranks = "\n".join(map(_format_state, ordered))
    return "\n\n".join([_format_start(cause, ordered), ranks, *map(_format_rank, ordered)]) + "\n"


def format_overview(cause: HangCause | None, evidence: Sequence[RankEvidence]) -> str:
    """The summary, or that no rank waits, and a line for each rank."""
    ordered = sorted(evidence, key=lambda each: each.rank)
    return "\n".join([_format_start(cause, ordered), *map(_format_state, ordered)])


def _format_start(cause: HangCause | None, evidence: Sequence[RankEvidence]) -> str:
    """The summary; without a cause, also if that is because the collectives of a rank cannot be read."""
    if cause is not None:
        return format_summary(cause)
    errors = {each.rank: each.error for each in evidence if each.error}
    return format_unreadable(errors) if errors else f"samestep: {_NO_CAUSE}."


def format_unreadable(errors: Mapping[int, str]) -> str:
    """That the launcher cannot detect hangs, because it cannot read the collectives of ranks; `errors` is by rank."""
    rank = min(errors)
    return (
        f"samestep: the launcher cannot read the collectives of rank {rank} ({errors[rank]}), so it cannot detect "
        "hangs: this version of torch may be too new for samestep; a hang ends by torch's timeouts, and "
        "`py-spy dump --pid PID` shows the line of a rank"
    )


def format_end(seconds: float, has_continued: bool, codes: Mapping[int, int | None]) -> str:
    """That a wait is over; if no rank has called a collective since, with the exit codes of ranks that have ended.

    >>> format_end(45, True, {0: None, 1: None})
    'samestep: the ranks continue after 45 s'
    >>> format_end(45, False, {0: 0, 1: None})
    'samestep: no rank waits any more, after 45 s; rank 0 has ended with exit code 0'
    """
    ended = [f"rank {rank} has ended with exit code {code}" for rank, code in sorted(codes.items()) if code is not None]
    if has_continued or not ended:
        return f"samestep: the ranks continue after {seconds:.0f} s"
    return "; ".join([f"samestep: no rank waits any more, after {seconds:.0f} s", *ended[:_SHOWN_RANKS]])


def report_json(cause: HangCause | None, evidence: Sequence[RankEvidence]) -> dict[str, Any]:
    """The report as JSON values.

    - `version`: 1; it changes if a key changes its meaning
    - `summary`: the text of format_summary, or null
    - `cause`: null if no rank waits for another one, else `kind`, `culprits`, `waiting`, `seconds`, `headline`,
      `sentences` (`text`, `frame`), `collective`, `call`, `lateness` and `remedy`
    - `ranks`: the evidence of each rank, see RankEvidence, with `user_frame` (`file`, `line`, `function` or null)
    """
    return {
        "version": JSON_VERSION,
        "summary": None if cause is None else format_summary(cause),
        "cause": None if cause is None else cause.to_json(),
        "ranks": [
            {**each.to_json(), "user_frame": None if (frame := user_frame(main_stack(each))) is None else vars(frame)}
            for each in sorted(evidence, key=lambda each: each.rank)
        ],
    }


def format_frame(frame: Frame) -> str:
    """`train.py:27: time.sleep(120)`, relative to the current folder if the file is below it."""
    source = " ".join(linecache.getline(frame.file, frame.line).split())
    if len(source) > _SOURCE_LENGTH:
        source = source[: _SOURCE_LENGTH - 3] + "..."
    return f"{_short_path(frame.file)}:{frame.line}" + (f": {source}" if source else f" in {frame.function}")


def _format_time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < _MINUTES_FROM else f"{seconds / 60:,.3g} min"


def _short_path(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else os.fspath(path)


def _format_sentence(sentence: Sentence) -> str:
    return sentence.text if sentence.frame is None else f"{sentence.text} {format_frame(sentence.frame)}"


def _format_state(each: RankEvidence) -> str:
    start = f"rank {each.rank} (node {each.node}, pid {each.process.pid})"
    if each.exit_code is not None:
        how = f"by signal {-each.exit_code}" if each.exit_code < 0 else f"with exit code {each.exit_code}"
        return f"{start}: ended {how}"
    frame = user_frame(main_stack(each))
    at = f", at {format_frame(frame)}" if frame is not None else ""
    calls = each.collectives
    pending = sum(call.is_pending for call in calls) if calls is not None else 0
    state = f"{pending} pending collective{'s' * (pending != 1)}" if calls is not None else "does not answer"
    if each.error:
        state = f"samestep cannot read its collectives ({each.error})"
    return f"{start}: {describe_process(each)}, {state}{at}"


def _format_rank(each: RankEvidence) -> str:
    lines = [f"--- rank {each.rank} (node {each.node}, pid {each.process.pid}) ---"]
    lines += _format_stacks(each.process)
    for child in each.children:
        command = f": {child.command}" if child.command else ""
        lines += [f"child process {child.pid} ({child.state}){command}", *_format_stacks(child)]
    if each.collectives:
        lines.append("last collectives (the latest last)")
        latest = sorted(each.collectives, key=lambda call: call.called)[-_SHOWN_COLLECTIVES:]
        lines += [f"  {_format_collective(call, each.collected)}" for call in latest]
    if each.full_disk:
        lines.append(f"full file system: {each.full_disk}")
    if each.oom_kills:
        lines.append(f"processes that the kernel killed for memory on this node: {each.oom_kills}")
    if each.last_lines:
        lines += ["end of its log", *(f"  {line}" for line in each.last_lines[-_SHOWN_LOG_LINES:])]
    return "\n".join(lines)


def _format_collective(call: Collective, collected: float) -> str:
    frame = user_frame(call.stack)
    state = "pending" if call.is_pending else "complete"
    at = f", at {format_frame(frame)}" if frame is not None else ""
    return f"group {call.group}: {describe_call(call)}, {state}, called {collected - call.called:,.1f} s ago{at}"


def _format_stacks(process: ProcessInfo) -> list[str]:
    lines = list[str]()
    for thread, stack in process.stacks.items():
        lines.append(f"thread {thread} (the innermost line first)")
        lines += [f"  {frame} in {frame.function}" for frame in stack]
    return lines
