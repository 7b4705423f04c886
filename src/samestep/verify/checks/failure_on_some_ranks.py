"""An error that only happens with several ranks.

What it compares: how the ranks end with how one rank ends: with an error, by a signal, or with an exit code. An error
that one rank raises as well is the script's own and no finding: verify then ends with exit status 2.

Fault: state that exists on one rank only, such as `self.vocab` that Lightning's `prepare_data` assigns on rank 0, and
that `setup` reads on every rank.

Repair: create on every rank what every rank reads; use `prepare_data` for files only.
"""

import signal
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.diverging_collectives import is_connection_error
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import attribute_assignments


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report errors of ranks that are not consequences of others."""
    failed = [trace for trace in worlds.many if trace.ending.error and not is_connection_error(trace)]
    if not failed:
        yield from _crashes(worlds)
    if not failed or (
        worlds.one is not None and any(trace.ending.error == failed[0].ending.error for trace in worlds.one)
    ):
        return
    trace = failed[0]
    attribute = trace.ending.details.get("attribute")
    if trace.ending.error == "AttributeError" and attribute and len(failed) < len(worlds.many.ranks):
        location = _assigned_elsewhere(worlds, trace, attribute)
        if location is not None:
            yield CHECK.finding(
                location,
                f"{trace.ending.details.get('owner')}.{attribute} is assigned on some ranks only: rank {trace.rank} "
                f"fails with AttributeError at {first(trace.ending.site)}",
                ranks=[trace.rank],
                related=trace.ending.site[:1],
                repair="assign it on every rank; in Lightning in setup(), since prepare_data() runs on one rank",
            )
            return
    message = trace.ending.message.strip().splitlines()
    is_on_all = len(failed) == len(worlds.many.ranks)
    is_compared = worlds.one is not None and not worlds.one.run.timed_out
    if is_on_all and not is_compared:
        return  # one rank may fail as well
    yield CHECK.finding(
        first(trace.ending.site),
        f"{'all ranks fail' if is_on_all else f'rank {trace.rank} fails'} with {trace.ending.error}: "
        f"{message[0][:200] if message else ''}{'; one rank does not' if is_compared else ''}",
        ranks=[each.rank for each in failed],
    )


def _crashes(worlds: Worlds) -> Iterator[Finding]:
    """Ranks that a signal or sys.exit has ended before the others were done, if one rank ends without an error."""
    many = worlds.many
    if not many.run.hung and not many.run.was_ended and all(each.has_exited or not each.ending.code for each in many):
        return  # sys.exit(3) after the training
    crashed = [trace for trace in worlds.many if trace.ending.code not in (None, 0)]
    crashed = [trace for trace in crashed if not trace.ending.error]
    if crashed and worlds.one is not None and worlds.one.ranks and not worlds.one.failed:
        trace = crashed[0]
        code = trace.ending.code or 0
        how = f"is ended by {signal.Signals(-code).name}" if code < 0 else f"ends with exit code {code}"
        yield CHECK.finding(
            trace.position,
            f"rank {trace.rank} {how} at {trace.position}; one rank does not",
            ranks=[each.rank for each in crashed],
        )


def _assigned_elsewhere(worlds: Worlds, failed: RankTrace, attribute: str) -> Location | None:
    """The statement that assigns an attribute and that the rank which lacks it has not executed."""
    found = attribute_assignments(worlds.files, attribute)
    missing = [(file, node.lineno) for file, node in found if (file, node.lineno) not in failed.executed]
    return Location(*missing[0]) if missing else None


CHECK = Check(
    "SS901",
    "failure-on-some-ranks",
    "error",
    "the run ends with an error, or the other ranks wait",
    "repair the cause of the error on the rank that fails",
    find,
)
