"""Edits of source files: small changes that rules propose, applied so that the file keeps its format."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep.findings import Edit, Finding
from samestep.lint.notebooks import split_lines
from samestep.lint.source_files import SourceFile, read_text


def add_keyword(file: SourceFile, call: ast.Call, text: str) -> tuple[Edit, ...]:
    """Add a keyword argument such as "sync_dist=True" at the end of a call; no edit if that is not safe."""
    may_have_it = any(each.arg is None for each in call.keywords)  # f(**options)
    if file.cells or may_have_it or call.end_lineno is None or call.end_col_offset is None:
        return ()
    last = max(
        (*call.args, *call.keywords), key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0), default=None
    )
    if last is None:
        return _insertion(file, call.end_lineno, file.column(call.end_lineno, call.end_col_offset) - 1, text)
    if isinstance(last, ast.GeneratorExp) and len(call.args) == 1 and not call.keywords:
        return ()  # needs parentheses
    end = _end_of_arguments(file, call, last)
    if end is None:
        return ()
    line, column, has_comma = end
    if line < call.end_lineno and _is_alone(file, last):  # one argument per line
        indent = _indent(file, last.lineno)
        if "#" in file.lines[line - 1][column:]:  # the comment stays behind its argument
            comma = () if has_comma else _insertion(file, line, column, ",")
            return (*comma, *_insertion(file, line + 1, 0, f"{indent}{text}{',' if has_comma else ''}\n"))
        return _insertion(file, line, column, f"\n{indent}{text}," if has_comma else f",\n{indent}{text}")
    return _insertion(file, line, column, f" {text}," if has_comma else f", {text}")


def insert_lines(file: SourceFile, before: ast.stmt, lines: Sequence[str]) -> tuple[Edit, ...]:
    """Insert statements before another one, with its indentation; four spaces in a line are one more level."""
    indent = _indent(file, before.lineno)
    if file.cells or indent != file.lines[before.lineno - 1][: before.col_offset]:
        return ()  # something else is on the same line
    level = "\t" if indent.startswith("\t") else "    "
    text = "".join(f"{indent}{line.replace('    ', level)}\n" for line in lines)
    return (Edit(str(file.path), before.lineno, 0, before.lineno, 0, text),)


@dataclass
class EditResult:
    """The files with their edits, and the edits that are left out."""

    changed: dict[Path, str] = field(default_factory=dict[Path, str])
    """The new text of each file that changes."""
    left_out: list[tuple[Finding, str]] = field(default_factory=list[tuple[Finding, str]])
    """Findings whose edits are not applied, and why."""


def apply_edits(findings: Iterable[Finding]) -> EditResult:
    """Apply the edits of findings to the texts of their files. If edits overlap, only the first is applied.

    Each finding is applied or left out for itself: the file must parse afterwards.
    """
    result, texts, applied = EditResult(), dict[Path, str](), dict[Path, list[Edit]]()
    for finding in findings:
        if not finding.edits:
            continue
        path = Path(finding.edits[0].file)
        before = texts[path] if path in texts else texts.setdefault(path, read_text(path)[0])
        others = applied.setdefault(path, [])
        if any(_overlap(edit, other) for edit in finding.edits for other in others):
            result.left_out.append((finding, "another edit changes the same position"))
            continue
        after = _apply(before, [*others, *finding.edits])
        if not _parses(after):
            result.left_out.append((finding, "the file would not parse afterwards"))
            continue
        others += finding.edits
        result.changed[path] = after
    return result


def _overlap(one: Edit, other: Edit) -> bool:
    start, end = (one.line, one.column), (one.end_line, one.end_column)
    return start <= (other.end_line, other.end_column) and (other.line, other.column) <= end


def _apply(text: str, edits: Sequence[Edit]) -> str:
    newline = "\r\n" if "\r\n" in text else "\n" if "\n" in text else "\r"
    lines = split_lines(text, with_ends=True)
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


def _insertion(file: SourceFile, line: int, column: int, text: str) -> tuple[Edit, ...]:
    return (Edit(str(file.path), line, column, line, column, text),)


def _end_of_arguments(file: SourceFile, call: ast.Call, last: ast.expr | ast.keyword) -> tuple[int, int, bool] | None:
    """Line and column behind the last argument with its parentheses and its comma, and whether it has a comma.

    None if there is something else before the closing parenthesis of the call.
    """
    line, end_line = last.end_lineno or 0, call.end_lineno or 0
    column, end = file.column(line, last.end_col_offset or 0), file.column(end_line, (call.end_col_offset or 0) - 1)
    found = line, column, False
    while (line, column) < (end_line, end):
        text = file.lines[line - 1][column : end if line == end_line else None]
        for offset, character in enumerate(text.partition("#")[0]):
            if character in "),":
                found = line, column + offset + 1, character == ","
            elif not character.isspace() and character != "\\":
                return None
        line, column = line + 1, 0
    return found


def _is_alone(file: SourceFile, node: ast.expr | ast.keyword) -> bool:
    """Whether an argument is the first thing on its line."""
    return not file.lines[node.lineno - 1].encode("utf-8")[: node.col_offset].strip(b" \t(")


def _indent(file: SourceFile, line: int) -> str:
    text = file.lines[line - 1]
    return text[: len(text) - len(text.lstrip())]
