"""Findings: faults of distributed training that `samestep verify` and `samestep lint` report with the same codes."""

import ast
import linecache
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From the worst: an error makes the result wrong, a warning may, and a note is about a legitimate choice."""
Segment = tuple[str, str]
"""A part of a line, and its style by rich's name for it; an empty style for plain text."""
TEXT_WIDTH: Final = 110
"""The width of findings in a pipe and in the report of a test; at most this on a terminal."""
_STYLES: Final = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_LABEL_WIDTH: Final = 10
_MAX_SOURCE_LINES: Final = 8
_COMPOUND: Final = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.FunctionDef,
                    ast.AsyncFunctionDef, ast.ClassDef, ast.Match)  # fmt: skip


@dataclass(frozen=True, order=True)
class Location:
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""
    column: int = 0
    """From 1; 0 if it is not known."""
    cell: int = 0
    """Of a notebook: the number of the cell, from 1. `line` then counts the lines of all code cells."""
    cell_line: int = 0
    """The line in the cell."""

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        line = f"cell {self.cell}:{self.cell_line}" if self.cell else self.line
        return f"{relative_path(self.file)}:{line}{column}"

    @property
    def cell_text(self) -> str:
        """Such as "cell 2, line 4"; empty if the file is not a notebook."""
        return f"cell {self.cell}, line {self.cell_line}" if self.cell else ""

    @property
    def source_position(self) -> tuple[str, int]:
        """The name of the source in `linecache`, and the line there; each cell of a notebook is a source."""
        return (f"{self.file}, cell {self.cell}", self.cell_line) if self.cell else (self.file, self.line)

    @property
    def source(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(*self.source_position).strip()


@dataclass(frozen=True, order=True)
class Edit:
    """A replacement of text in a file, from one position to another. Lines count from 1, columns from 0."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One fault: where it is, what was seen, why it matters and how to repair it."""

    code: str
    """Such as "SS101": the first digit is the family."""
    name: str
    """Such as "duplicated-training-data"."""
    severity: Severity
    location: Location | None
    summary: str
    """What happens, with the numbers that show it, in one sentence."""
    consequence: str
    repair: str
    evidence: Sequence[str] = ()
    """More of what was seen, a line each."""
    ranks: Sequence[int] = ()
    """The ranks that are involved; empty if all are, or if nothing was run."""
    related: Sequence[Location] = ()
    """Other lines that belong to it."""
    follows: Sequence["Finding"] = field(default=())
    """Findings that this one explains."""
    edits: Sequence[Edit] = ()
    """What `samestep lint --fix` changes; empty if no safe repair is known."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            **asdict(self),
            "location": None if self.location is None else _location_json(self.location),
            "related": [_location_json(each) for each in self.related],
            "follows": [each.to_json() for each in self.follows],
            "edits": [{**asdict(each), "file": relative_path(each.file)} for each in self.edits],
        }


def _location_json(location: Location) -> dict[str, Any]:
    fields = {**asdict(location), "file": relative_path(location.file), "source": location.source}
    absent = [*(["column"] if not location.column else []), *(["cell", "cell_line"] if not location.cell else [])]
    return {name: value for name, value in fields.items() if name not in absent}


def relative_path(file: str) -> str:
    """A path below the current folder as users type it; another one unchanged."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return file


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; otherwise in the given order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def format_findings(findings: Iterable[Finding], width: int = TEXT_WIDTH) -> str:
    """All findings as plain text."""
    texts = ("\n".join("".join(text for text, _ in line) for line in finding_lines(each, width)) for each in findings)
    return "\n\n".join(texts)


def finding_lines(finding: Finding, width: int = TEXT_WIDTH) -> Iterator[tuple[Segment, ...]]:
    """The lines of a finding: where and which one, the source, what was seen, why it matters, how to repair it."""
    place = () if finding.location is None else ((f"{finding.location}: ", "bold"),)
    yield (
        *place,
        (finding.severity, _STYLES[finding.severity]),
        (f" {finding.code}", "bold"),
        (f" {finding.name}", ""),
    )
    if finding.location is not None and (lines := source_lines(finding.location)):
        yield from _marked(lines, finding.location)
    quoted = " ".join(finding.evidence)
    rows = [("seen", finding.summary), *(("", each) for each in finding.evidence)]
    if finding.ranks:
        rows.append(("ranks", ", ".join(map(str, finding.ranks))))
    rows += [("why", finding.consequence), ("repair", finding.repair)]
    related = [each for each in dict.fromkeys(finding.related) if str(each) not in quoted]
    rows += _label("related", [f"{each}: {each.source}" if each.source else str(each) for each in related])
    space = width - _LABEL_WIDTH - 2
    rows += _label("explains", [_one_line(each, space) for each in finding.follows])
    for label, text in rows:
        yield from labeled_lines(label, text, width)


def labeled_lines(
    label: str, text: str, width: int = TEXT_WIDTH, column: int = _LABEL_WIDTH
) -> Iterator[tuple[Segment, ...]]:
    """A text beside its label, wrapped."""
    wrapped = textwrap.wrap(text, max(20, width - column - 2), break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(wrapped or [""]):
        yield (f"  {label if number == 0 else '':{column}}", "bold"), (line, "")


def count_findings(findings: Iterable[Finding]) -> str:
    """How many there are of each severity, such as "2 errors and 1 warning"."""
    counts = Counter(finding.severity for finding in findings)
    words = [f"{counts[each]} {each}{'s' * (counts[each] > 1)}" for each in SEVERITIES if counts[each]]
    return " and ".join(words) or "no faults"


def source_lines(location: Location) -> list[tuple[int, str, bool]]:
    """The statement at a location with a line before and after it: numbers, texts, and which belong to the statement.

    The numbers are those of the cell in a notebook. Common indentation is removed. Of a loop, a condition or a
    function only the head is the statement. Empty if the file cannot be read.
    """
    file, line = location.source_position
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return []
    start, end = _statement("".join(lines), line)
    if end - start >= _MAX_SOURCE_LINES:
        start = max(start, line - 1)
        end = min(end, start + _MAX_SOURCE_LINES - 1)
    numbers = range(max(1, start - 1), min(len(lines), end + 1) + 1)
    texts = textwrap.dedent("".join(lines[number - 1].expandtabs().rstrip() + "\n" for number in numbers)).split("\n")[
        :-1
    ]
    shown = [(number, text, start <= number <= end) for number, text in zip(numbers, texts, strict=True)]
    return [each for each in shown if each[1] or each[2]]


def _statement(source: str, line: int) -> tuple[int, int]:
    """The first and the last line of the innermost statement on a line; the line itself if Python cannot parse it."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        around = [
            (node.lineno, _last_line(node))
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and node.lineno <= line <= _last_line(node)
        ]
        return max(around, default=(line, line))
    return line, line


def _last_line(statement: ast.stmt) -> int:
    if isinstance(statement, _COMPOUND):
        inner = statement.cases[0].pattern if isinstance(statement, ast.Match) else statement.body[0]
        return max(statement.lineno, inner.lineno - 1)
    return statement.end_lineno or statement.lineno


def _marked(lines: Sequence[tuple[int, str, bool]], location: Location) -> Iterator[tuple[Segment, ...]]:
    """The source, with a mark at the statement and, if the column is known, a line under what is meant."""
    digits = len(str(lines[-1][0]))
    indent = _removed_indent(lines, location)
    for number, text, is_marked in lines:
        mark, style = (">", "bold") if is_marked else (" ", "dim")
        yield (f"  {mark} ", "bold red" if is_marked else ""), (f"{number:{digits}} | ", "dim"), (text, style)
        start = location.column - 1 - indent
        if number == location.source_position[1] and location.column and 0 <= start < len(text):
            yield ("    ", ""), (f"{'':{digits}} | ", "dim"), (" " * start + "^" * (len(text) - start), "bold red")


def _removed_indent(lines: Sequence[tuple[int, str, bool]], location: Location) -> int:
    """How many columns of common indentation the shown lines have lost."""
    file, line = location.source_position
    text = next((text for number, text, _ in lines if number == line), "")
    full = linecache.getline(file, line).expandtabs().rstrip()
    return len(full) - len(text)


def _label(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", text) for number, text in enumerate(texts)]


def _one_line(finding: Finding, width: int) -> str:
    place = "" if finding.location is None else f"{finding.location}: "
    return textwrap.shorten(f"{place}{finding.code} {finding.name}: {finding.summary}", width, placeholder=" ...")
