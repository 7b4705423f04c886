"""What a check is: a function that compares worlds and yields findings, with the text that all its findings share."""

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

from samestep.findings import Finding, Location, Severity
from samestep.verify.data_flow import PRINTS, DataFlow
from samestep.verify.printed_numbers import NUMBER, numbers_of
from samestep.verify.rank_trace import RankTrace, WorldTrace
from samestep.verify.trace_events import Evaluation, Role, Site

_TOLERANCE: Final = 1e-5  # of sums in float32, in another order
Item = TypeVar("Item")


@dataclass(frozen=True)
class Worlds:
    """The worlds that were run, for checks to compare."""

    many: WorldTrace
    one: WorldTrace | None = None
    """The same script on one rank, with the global batch and the weights of `many`; None if it could not be run."""
    nodes: WorldTrace | None = None
    """As many ranks as in `many`, each on a separate node; None if the script does not ask for local ranks."""

    @cached_property
    def files(self) -> list[str]:
        """The files of user code that were executed."""
        return sorted({file for trace in self.many for file, _, _ in trace.codes.values()})

    @cached_property
    def is_distributed(self) -> bool:
        """Whether the script has created a process group."""
        return any(trace.of("init") for trace in self.many)

    @cached_property
    def evaluated(self) -> DataFlow:
        """What depends on the results of models that rank 0 evaluates."""
        evaluations = self.many[0].evaluations if self.many.ranks else []
        return DataFlow(self.files, {call.site[0] for each in evaluations for call in each.calls if call.site})

    @cached_property
    def trained(self) -> DataFlow:
        """What depends on the results of models that rank 0 trains."""
        steps = self.many[0].steps if self.many.ranks else []
        return DataFlow(self.files, {call.site[0] for step in steps for call in step.calls if call.site})

    def executed(self, rank: int = 0) -> set[tuple[str, int]]:
        """Files and lines that a rank has executed."""
        return self.many[rank].executed if rank < len(self.many.ranks) else set()


@dataclass(frozen=True)
class Check:
    """A comparison, with what its findings mean. The docstring of its module is its page."""

    code: str
    name: str
    severity: Severity
    consequence: str
    repair: str
    find: Callable[[Worlds], Iterator[Finding]]
    is_strict: bool = False
    """Whether it reports legitimate choices that depend on the number of ranks, which only `--strict` shows."""

    def finding(
        self,
        location: Location | None,
        summary: str,
        evidence: Sequence[str] = (),
        ranks: Sequence[int] = (),
        related: Sequence[Location] = (),
        repair: str = "",
        severity: Severity | None = None,
        consequence: str = "",
    ) -> Finding:
        """A finding of this check."""
        return Finding(
            self.code, self.name, severity or self.severity, location, summary, consequence or self.consequence,
            repair or self.repair, tuple(evidence), tuple(ranks), tuple(related),
        )  # fmt: skip


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first(site: Site) -> Location | None:
    """The innermost line of user code."""
    return site[0] if site else None


def same_on_all(values: Iterable[object]) -> bool:
    """Whether all values are equal."""
    found = list(values)
    return all(value == found[0] for value in found)


def pair_by(lists: Sequence[Sequence[Item]], key: Callable[[Item], object]) -> Iterator[tuple[Item, ...]]:
    """What ranks have in common: the n-th item with a key on every rank, for all keys and n that every rank has."""
    by_key = [dict[object, list[Item]]() for _ in lists]
    for found, items in zip(by_key, lists, strict=True):
        for item in items:
            found.setdefault(key(item), []).append(item)
    for each in by_key[0] if by_key else ():
        yield from zip(*(found.get(each, []) for found in by_key), strict=False)


def pair_epochs(ranks: Sequence[RankTrace], role: Role) -> Iterator[tuple[int, list[list[str]]]]:
    """The samples that each rank read in the n-th epoch of this role, for every n that all ranks have."""
    epochs = [trace.epochs_of(role) for trace in ranks]
    for number in range(min(map(len, epochs), default=0)):
        yield number, [each[number].samples for each in epochs]


@dataclass(frozen=True)
class Report:
    """A line with numbers that depend on an evaluation, printed by a rank before the next step."""

    site: Site
    text: str
    expected: str | None
    """What one rank prints there; None if it prints nothing."""
    values: list[str] | None
    """The numbers that depend on evaluations and on nothing else that differs between ranks; None if unknown."""
    expected_values: list[str] | None

    @property
    def is_same(self) -> bool | None:
        """Whether one rank prints the same numbers, but for rounding; None if it prints nothing."""
        if self.expected is None:
            return None
        one, two = self.values, self.expected_values
        if not one or two is None:
            one, two = NUMBER.findall(self.text), NUMBER.findall(self.expected)
        return len(one) == len(two) and all(
            math.isclose(float(a), float(b), rel_tol=_TOLERANCE) for a, b in zip(one, two, strict=True)
        )


def reports(worlds: Worlds, rank: int, evaluation: Evaluation) -> Iterator[Report]:
    """The lines by which a rank prints numbers that depend on an evaluation, before the next step."""
    printed = worlds.one[0].of("print") if worlds.one is not None and worlds.one.ranks else []
    expected = dict[Site, list[str]]()
    for event in printed:
        if event["s"] == evaluation.step:
            expected.setdefault(event["site"], []).append(event["text"])
    for event in worlds.many[rank].of("print"):
        location = first(event["site"])
        if event["s"] != evaluation.step or location is None or not NUMBER.search(event["text"]):
            continue
        texts = expected.get(event["site"], [])
        other = texts.pop(0) if texts else None
        if worlds.evaluated.reaches(location, PRINTS) is False:
            continue

        def is_metric(value: ast.expr, file: str = location.file) -> bool:
            return worlds.evaluated.depends(file, value) and not worlds.trained.depends(file, value)

        values = numbers_of(location, event["text"], is_metric)
        expected_values = numbers_of(location, other, is_metric) if other is not None else None
        yield Report(event["site"], event["text"], other, values, expected_values)
