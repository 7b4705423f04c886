"""Edits of source files: small changes that rules propose, applied so that the file keeps its format."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from samestep.findings import Edit, Finding
from samestep.lint.source_files import SourceFile


def add_keyword(file: SourceFile, call: ast.Call, text: str) -> tuple[Edit, ...]:
    """Add a keyword argument such as "sync_dist=True" at the end of a call; no edit if that is not safe."""
    if file.cells or call.end_lineno is None or call.end_col_offset is None:
        return ()
    last = max(
        (*call.args, *call.keywords), key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0), default=None
    )
    if last is None:
        return _insertion(file, call.end_lineno, call.end_col_offset - 1, text)
    if isinstance(last, ast.GeneratorExp) and len(call.args) == 1 and not call.keywords:
        return ()  # needs parentheses
    line, column = last.end_lineno or call.end_lineno, last.end_col_offset or 0
    if line < call.end_lineno and _is_alone(file, last):  # one argument per line
        indent = _indent(file, last.lineno)
        comma = _position_of_comma(file, line, column)
        if comma is None:
            return _insertion(file, line, column, f",\n{indent}{text}")
        return _insertion(file, line, comma + 1, f"\n{indent}{text},")
    return _insertion(file, line, column, f", {text}")


def insert_line(file: SourceFile, before: ast.stmt, text: str) -> tuple[Edit, ...]:
    """Insert a statement before another one, with its indentation."""
    if file.cells or _indent(file, before.lineno) != file.lines[before.lineno - 1][: before.col_offset]:
        return ()  # something else is on the same line
    return (Edit(str(file.path), before.lineno, 0, before.lineno, 0, f"{_indent(file, before.lineno)}{text}\n"),)


def apply_edits(findings: Iterable[Finding]) -> dict[Path, str]:
    """The new text of each file that findings change. Of edits that overlap, the first one counts."""
    by_file = defaultdict[Path, list[Sequence[Edit]]](list)
    for finding in findings:
        if finding.edits:
            by_file[Path(finding.edits[0].file)].append(finding.edits)
    changed = dict[Path, str]()
    for path, groups in by_file.items():
        text = _apply(read_text(path), [edit for edits in _without_overlap(groups) for edit in edits])
        if _parses(text):
            changed[path] = text
    return changed


def read_text(path: Path) -> str:
    """The text of a file with its own line ends."""
    return path.read_bytes().decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a text as it is, with its line ends."""
    path.write_bytes(text.encode("utf-8"))


def _without_overlap(groups: Sequence[Sequence[Edit]]) -> Iterator[Sequence[Edit]]:
    applied = list[Edit]()
    for edits in groups:
        if not any(_overlap(edit, other) for edit in edits for other in applied):
            applied += edits
            yield edits


def _overlap(one: Edit, other: Edit) -> bool:
    start, end = (one.line, one.column), (one.end_line, one.end_column)
    return start <= (other.end_line, other.end_column) and (other.line, other.column) <= end


def _apply(text: str, edits: Sequence[Edit]) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, reverse=True):
        start, end = lines[edit.line - 1][: edit.column], lines[edit.end_line - 1][edit.end_column :]
        lines[edit.line - 1 : edit.end_line] = [start + edit.text.replace("\n", newline) + end]
    return "".join(lines)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _insertion(file: SourceFile, line: int, offset: int, text: str) -> tuple[Edit, ...]:
    """Insert a text at an offset in bytes, as the syntax tree counts."""
    column = len(file.lines[line - 1].encode("utf-8")[:offset].decode("utf-8"))
    return (Edit(str(file.path), line, column, line, column, text),)


def _is_alone(file: SourceFile, node: ast.expr | ast.keyword) -> bool:
    """Whether an argument is the first thing on its line."""
    return not file.lines[node.lineno - 1].encode("utf-8")[: node.col_offset].strip()


def _indent(file: SourceFile, line: int) -> str:
    text = file.lines[line - 1]
    return text[: len(text) - len(text.lstrip())]


def _position_of_comma(file: SourceFile, line: int, offset: int) -> int | None:
    """The offset of the comma after an argument, on the same line."""
    rest = file.lines[line - 1].encode("utf-8")[offset:]
    stripped = rest.lstrip()
    return offset + len(rest) - len(stripped) if stripped.startswith(b",") else None
