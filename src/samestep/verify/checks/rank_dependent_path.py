"""Folders whose names differ between the ranks by chance.

What it compares: the paths that the ranks create at the same line. It is reported if folders differ by a time, by
random letters or by a fraction such as a loss, not by the number of the rank.

Fault: `Path("outputs") / datetime.now().strftime("%H-%M-%S-%f")` on every rank: the files of a checkpoint are in
different folders.

Repair: let rank 0 choose the name, and send it to the others with `dist.broadcast_object_list`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from samestep.findings import Finding, Location, relative_path
from samestep.verify.check import Check, Worlds
from samestep.verify.source import find_calls, is_about_ranks, statement_at, walk_head
from samestep.verify.trace_events import FileEvent, Site

_CHANCE = re.compile(r"\d{6,}|(\d+[-_:T.]){3,}\d+|[0-9a-f]{8}(-[0-9a-f]{4}){3}|^tmp\w{6,}|[0-9a-f]{8,}|\d\.\d{2,}")
_CREATES = ("mkdir", "write")
_SOURCES = ("now", "today", "utcnow", "time", "strftime", "time_ns", "uuid4", "uuid1", "mkdtemp", "token_hex", "getpid")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the folders of the ranks, line by line."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    own = f"{worlds.many.run.settings.mirror[1]}/"
    by_site = [
        _folders([event for event in trace.files if event.action in _CREATES and event.path.startswith(own)])
        for trace in ranks
    ]
    for site, folders in by_site[0].items():
        others = [each.get(site) for each in by_site[1:]]
        if not all(others) or any(folders & (each or set()) for each in others):
            continue
        one, other = min(folders), min(others[0] or {""})
        parts = [(a, b) for a, b in zip(PurePath(one).parts, PurePath(other).parts, strict=False) if a != b]
        if parts and all(_CHANCE.search(part) for part in parts[0]) and not _is_number_of_rank(*parts[0]):
            yield CHECK.finding(
                _source(worlds) or _naming_line(site),
                f"the ranks create folders with different names: {relative_path(one)} and {relative_path(other)}",
                related=list(site[:1]),
            )
            return


def _is_number_of_rank(one: str, other: str) -> bool:
    """Whether the names of ranks 0 and 1 differ only by the number of the rank, from 0 or from 1 on."""
    numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in (one, other)]
    if re.sub(r"\d+", "", one) != re.sub(r"\d+", "", other) or len(numbers[0]) != len(numbers[1]):
        return False
    differing = [(a, b) for a, b in zip(*numbers, strict=True) if a != b]
    return bool(differing) and all((a, b) in ((0, 1), (1, 2)) for a, b in differing)


def _folders(events: list[FileEvent]) -> dict[Site, set[str]]:
    found = dict[Site, set[str]]()
    for event in events:
        if event.site:
            folder = event.path if event.action == "mkdir" else str(PurePath(event.path).parent)
            found.setdefault(event.site, set()).add(folder)
    return found


def _naming_line(site: Site) -> Location:
    """The innermost line that formats a text without the rank, such as the name of a folder; or the one that writes."""
    for location in site:
        statement = statement_at(location)
        formatted = [node for node in walk_head(statement) if isinstance(node, ast.FormattedValue)] if statement else []
        if any(not is_about_ranks(node) for node in formatted):
            return location
    return site[0]


def _source(worlds: Worlds) -> Location | None:
    """The executed line that reads the clock or draws a name."""
    executed = worlds.executed(1)
    for file in worlds.files:
        for call in find_calls(file, _SOURCES):
            if (file, call.lineno) in executed:
                return Location(file, call.lineno)
    return None


CHECK = Check(
    "SS503",
    "rank-dependent-path",
    "error",
    "the files of one run are in several folders, and a checkpoint in one of them is incomplete",
    "let rank 0 choose the name and send it to the others with dist.broadcast_object_list",
    find,
)
