"""Findings for other programs: JSON, SARIF 2.1.0 for code hosts, and annotations of GitHub Actions."""

import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from samestep.findings import SEVERITIES, Finding, Location, relative_path
from samestep.lint.linter import LintResult
from samestep.lint.rule import Rule, page_of

SARIF_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS: Final = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}


def to_json(result: LintResult) -> str:
    """One JSON object: findings, the number of files, and files that could not be read."""
    counts = {each: sum(finding.severity == each for finding in result.findings) for each in SEVERITIES}
    return json.dumps(
        {
            "findings": [finding.to_json() for finding in result.findings],
            "files": result.files,
            "counts": counts,
            "problems": {relative_path(file): text for file, text in sorted(result.problems.items())},
            "shortened": [relative_path(file) for file in result.shortened],
            "warnings": result.warnings,
        },
        indent=2,
    )


def to_sarif(result: LintResult, rules: Sequence[Rule]) -> str:
    """A SARIF log with one run; problems with files are notifications of the tool."""
    numbers = {rule.code: number for number, rule in enumerate(rules)}
    run = {
        "tool": {
            "driver": {
                "name": "samestep lint",
                "version": version("samestep"),
                "rules": [_sarif_rule(rule) for rule in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not result.problems,
                "toolExecutionNotifications": [
                    {
                        "level": "error",
                        "message": {"text": text},
                        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(file)}}}],
                    }
                    for file, text in sorted(result.problems.items())
                ],
            }
        ],
        "results": [_sarif_result(finding, numbers) for finding in result.findings],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    page = page_of(rule)
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": page.split("\n", 1)[0]},
        "fullDescription": {"text": f"{rule.consequence[:1].upper()}{rule.consequence[1:]}."},
        "help": {"text": page, "markdown": page},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(finding: Finding, numbers: dict[str, int]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": numbers.get(finding.code, -1),
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": f"{_cell(finding)}{message(finding)} Repair: {finding.repair}."},
    }
    if finding.location is not None:
        result["locations"] = [_sarif_location(finding.location)]
    if finding.related:
        related = enumerate(dict.fromkeys(finding.related))
        result["relatedLocations"] = [{"id": number, **_sarif_location(each)} for number, each in related]
    if finding.edits:
        result["fixes"] = [{"description": {"text": finding.repair}, "artifactChanges": _sarif_changes(finding)}]
    return result


def _sarif_location(location: Location) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(location.file)}}
    if not location.cell:  # the lines of a notebook are those of its JSON
        column = {"startColumn": location.column} if location.column else {}
        place["region"] = {"startLine": location.line, **column}
    return {"physicalLocation": place}


def _sarif_changes(finding: Finding) -> list[dict[str, Any]]:
    return [
        {
            "artifactLocation": {"uri": _uri(edit.file)},
            "replacements": [
                {
                    "deletedRegion": {
                        "startLine": edit.line,
                        "startColumn": edit.column + 1,
                        "endLine": edit.end_line,
                        "endColumn": edit.end_column + 1,
                    },
                    "insertedContent": {"text": edit.text},
                }
            ],
        }
        for edit in finding.edits
    ]


def _uri(file: str) -> str:
    """A path relative to the current folder, which is how code hosts find the file; else a file URI."""
    path = relative_path(file)
    return Path(path).as_uri() if Path(path).is_absolute() else quote(Path(path).as_posix())


def to_github(findings: Iterable[Finding]) -> str:
    """A workflow command per finding, which GitHub shows at its line in a pull request."""
    return "\n".join(_annotation(finding) for finding in findings)


def _annotation(finding: Finding) -> str:
    title = _escape(f"{finding.code} {finding.name}", is_property=True)
    properties = [f"title={title}"]
    if finding.location is not None:
        path = _escape(relative_path(finding.location.file), is_property=True)
        columns = [f"col={finding.location.column}"] if finding.location.column else []
        lines = [] if finding.location.cell else [f"line={finding.location.line}", *columns]
        properties = [f"file={path}", *lines, *properties]
    text = _escape(f"{_cell(finding)}{message(finding)}\nRepair: {finding.repair}.")
    return f"::{_GITHUB_COMMANDS[finding.severity]} {','.join(properties)}::{text}"


def _escape(text: str, is_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


def _cell(finding: Finding) -> str:
    """Where it is in a notebook, such as "Cell 2, line 4: "; empty for other files."""
    text = finding.location.cell_text if finding.location is not None else ""
    return f"{text.capitalize()}: " if text else ""


def message(finding: Finding) -> str:
    """What is wrong, with its evidence and its consequence, as sentences."""
    parts = [finding.summary, *finding.evidence, finding.consequence]
    return " ".join(f"{part[:1].upper()}{part[1:]}{'' if part.endswith('.') else '.'}" for part in parts if part)
