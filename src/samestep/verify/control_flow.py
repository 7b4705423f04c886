"""Where ranks took different ways: the first call in which they differ, and the branch that led there."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from itertools import pairwise

from samestep.findings import Location
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import parents, statement_at
from samestep.verify.trace_events import Site, SyncPoint

_MAX_LINES = 3000  # of each rank since the last common call


Kinds = tuple[type[ast.If | ast.While | ast.For], ...]
BRANCHES: Kinds = (ast.If, ast.While)
LOOPS: Kinds = (ast.For,)


@dataclass(frozen=True)
class Divergence:
    """The first call in which ranks differ: what each of them called, or None if it called nothing more."""

    number: int
    points: dict[int, SyncPoint | None]

    @property
    def is_shape_only(self) -> bool:
        """Whether all ranks made the same call at the same line, with other shapes or dtypes."""
        points = [point for point in self.points.values() if point is not None]
        same = {(point.name, point.site[:1], point.batches if point.is_wrapper else 0) for point in points}
        return len(points) == len(self.points) and len(same) == 1


def find_divergence(ranks: Sequence[RankTrace], has_failed: bool = True) -> Divergence | None:
    """Compare the calls of all ranks in their order.

    If no rank has failed, only calls of collectives count, since DDP has found its counterparts somehow.
    """
    calls = {trace.rank: shared_points(trace, has_failed) for trace in ranks}
    longest = max(map(len, calls.values()), default=0)
    for number in range(longest):
        points = {rank: each[number] if number < len(each) else None for rank, each in calls.items()}
        if len({None if point is None else _signature(point) for point in points.values()}) > 1:
            return Divergence(number, points)
    return None


def shared_points(trace: RankTrace, with_wrappers: bool = True) -> list[SyncPoint]:
    """The calls that all ranks must make."""
    return [point for point in trace.sync_points if point.group == "world" and (with_wrappers or not point.is_wrapper)]


def _signature(point: SyncPoint) -> tuple[object, ...]:
    """What must be equal on all ranks. A backward pass of DDP belongs to a batch, which a rank may have skipped."""
    return point.name, point.group, str(_size(point)), point.root, point.batches if point.is_wrapper else 0


def _size(point: SyncPoint) -> object:
    """What must be equal on all ranks: the sizes of most collectives."""
    return (
        point.source
        if point.name in ("all_reduce", "broadcast", "all_gather", "reduce", "all_gather_into_tensor")
        else None
    )


def find_branch(
    ranks: Sequence[RankTrace], divergence: Divergence, kinds: Kinds = BRANCHES
) -> tuple[RankTrace, Location, Location] | None:
    """The branch at which two ranks took different ways for good: the rank that took the way of the minority of lines,
    the line of the branch, and the line that this rank executed next.
    """
    known = [trace for trace in ranks if trace.lines[1]]
    if len(known) < 2:
        return None
    one = known[0]
    other = next((trace for trace in known[1:] if _differ(divergence, one, trace)), known[1])
    paths = [_path(trace, divergence.number) for trace in (one, other)]
    matcher = SequenceMatcher(None, *([(each.file, each.line) for each in path] for path in paths), autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    if not blocks:
        return None
    for end_one, end_other in _ends(blocks, [len(path) for path in paths]):
        ends = ((one, paths[0], end_one), (other, paths[1], end_other))
        following = [(trace, path[end]) for trace, path, end in ends if end < len(path)]
        common = paths[0][:end_one]
        for trace, location in following:  # the condition may have called functions, so it is not the last common line
            branch = next((each for each in reversed(common) if in_same_function(each, location)), common[-1])
            statement = statement_at(branch)
            if isinstance(statement, kinds) and _is_inside(location, statement.body):
                return trace, branch, location
    return None


def _ends(blocks: Sequence[Match], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where common lines end in both paths: for good, or else before the longest detour of one rank."""
    last = blocks[-1]
    ends = (last.a + last.size, last.b + last.size)
    if ends[0] < lengths[0] or ends[1] < lengths[1]:
        return [ends]
    detours = list[tuple[int, tuple[int, int]]]()
    for before, after in pairwise(blocks):
        end_one, end_other = before.a + before.size, before.b + before.size
        detours.append((max(after.a - end_one, after.b - end_other), (end_one, end_other)))
    return [position for _, position in sorted(detours, reverse=True)]


def in_same_function(one: Location, other: Location) -> bool:
    """Whether two lines are in the same function."""
    return (one.file, one.function) == (other.file, other.function)


def _differ(divergence: Divergence, one: RankTrace, other: RankTrace) -> bool:
    return divergence.points.get(one.rank) != divergence.points.get(other.rank)


def _path(trace: RankTrace, number: int) -> list[Location]:
    """The lines that a rank executed since the last call that all ranks share."""
    points = shared_points(trace)
    start = points[number - 1].position if 0 < number <= len(points) else 0
    end = points[number].position if number < len(points) else None
    first, lines = trace.lines
    chosen = lines[max(0, start - first - 1) : None if end is None else max(0, end - first)]
    return [trace.locate(entry) for entry in chosen[:_MAX_LINES]]


def _is_inside(location: Location, body: Sequence[ast.stmt]) -> bool:
    return bool(body) and body[0].lineno <= location.line <= (body[-1].end_lineno or body[-1].lineno)


def frame_inside(site: Site, branch: Location, kinds: Kinds = BRANCHES) -> Location | None:
    """The line of a stack that is inside of the branch of a condition, in the same function."""
    statement = statement_at(branch)
    if not isinstance(statement, kinds):
        return None
    for location in site:
        same = location.file == branch.file and location.function == branch.function
        if same and (_is_inside(location, statement.body) or _is_inside(location, statement.orelse)):
            return location
    return None


def differing_frame(one: Site, other: Site) -> Location | None:
    """The line of `one` in the innermost function that both stacks are in, at different lines."""
    outer_one, outer_other = list(reversed(one)), list(reversed(other))
    for mine, theirs in zip(outer_one, outer_other, strict=False):
        if mine != theirs:
            return mine if (mine.file, mine.function) == (theirs.file, theirs.function) else None
    return one[0] if one else None


def is_branch_of_one_rank(ranks: Sequence[RankTrace], divergence: Divergence) -> bool:
    """Whether a rank waits in a collective inside of a condition that the others have passed by and gone on."""
    gone = [trace for trace in ranks if divergence.points[trace.rank] is None]
    waiting = [point for point in divergence.points.values() if point is not None and not point.is_complete]
    for location in (each for point in waiting if not point.is_wrapper for each in point.site):
        statement = statement_at(location)
        heads = [node.lineno for node in parents(statement) if isinstance(node, ast.If)] if statement else []
        for trace in gone:
            passed = any((location.file, line) in trace.executed for line in heads)
            if passed and (location.file, location.line) not in trace.executed:
                return True
    return False


def is_guarded(location: Location) -> bool:
    """Whether a line is inside of a condition, in its function."""
    statement = statement_at(location)
    if statement is None:
        return False
    for node in parents(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if isinstance(node, ast.If):
            return True
    return False


def early_exit(location: Location, executed: set[tuple[str, int]]) -> Location | None:
    """The condition before a line that keeps other ranks from it: they leave the function or the round of the loop.

    `executed` has the lines of these ranks.
    """
    statement: ast.AST | None = statement_at(location)
    for parent in parents(statement) if statement is not None else ():
        before = [each for each in getattr(parent, "body", []) if each.lineno < location.line]
        for each in reversed(before):
            is_exit = isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return | ast.Continue | ast.Break)
            if is_exit and (location.file, each.body[-1].lineno) in executed:
                return replace(location, line=each.lineno)
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    return None


def condition_of(location: Location) -> str:
    """The text of the condition on a line, such as `if rank == 0`; empty if there is none."""
    statement = statement_at(location)
    if isinstance(statement, (*BRANCHES, *LOOPS)):
        text = replace(location, line=statement.lineno).source.rstrip(":")
        return text if len(text) <= 80 else f"{text[:77]}..."
    return ""
