"""Every rule finds the bad example of its page and nothing in the good one; the corpus; our own sources."""

import ast
import json
import re
from pathlib import Path

import pytest

from samestep.findings import Finding
from samestep.lint.linter import lint
from samestep.lint.rule import Rule, page_of
from samestep.lint.rules import RULES

REPOSITORY = Path(__file__).resolve().parents[2]
CORPUS = REPOSITORY / "tests" / "corpus"
CASES = sorted(path.parent for path in CORPUS.glob("*/*/meta.json"))
COMPOUND = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)
EXAMPLE = re.compile(r"^(Bad|Good):\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BY_CODE = {rule.code: rule for rule in RULES}


def examples(rule: Rule) -> dict[str, str]:
    return dict(EXAMPLE.findall(page_of(rule)))


def reported(paths: list[Path]) -> list[Finding]:
    """What `samestep lint` reports without --strict."""
    result = lint(paths)
    assert result.problems == {}
    return [finding for finding in result.findings if finding.severity != "note"]


def meta(case: Path) -> dict:
    return json.loads((case / "meta.json").read_text())


def faulty_lines(case: Path) -> set[int]:
    """The lines of the faulty statement and of those that may be named instead; of a compound one only the first."""
    about = meta(case)
    statements = [
        node
        for node in ast.walk(ast.parse((case / "buggy.py").read_text()))
        if isinstance(node, ast.stmt) and not isinstance(node, COMPOUND)
    ]
    lines = set[int]()
    for first, last in [(about["line"], about.get("end_line", about["line"])), *about.get("alt_lines", [])]:
        around = [node for node in statements if node.lineno <= first <= (node.end_lineno or node.lineno)]
        lines |= set(range(first, last + 1))
        lines |= {line for node in around for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


FAULTS = [case for case in CASES if (case / "buggy.py").exists() and meta(case)["static"]]
CORRECT = sorted(path for name in ("fixed.py", "script.py") for path in CORPUS.glob(f"*/*/{name}"))


def test_there_are_forty_rules_with_unique_codes_and_names():
    assert len(RULES) >= 40
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert {rule.code[2] for rule in RULES} == set("1234567")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_page_of_a_rule_has_what_why_examples_and_source(rule):
    page = page_of(rule)
    assert examples(rule).keys() == {"Bad", "Good"}
    assert page.split("\n\n")[0].count("\n") == 0, "the first line says what is wrong"
    assert re.search(r"^Source: \S", page, re.MULTILINE)
    module = rule.find.__module__.rpartition(".")[2]
    assert module == f"{rule.code.lower()}_{rule.name.replace('-', '_')}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_finds_its_bad_example_and_nothing_in_the_good_one(rule, tmp_path):
    found = dict[str, list[Finding]]()
    for kind, text in examples(rule).items():
        path = tmp_path / f"{kind.lower()}.py"
        path.write_text(text)
        result = lint([path])
        assert result.problems == {}
        found[kind] = [
            finding for finding in result.findings if finding.severity != "note" or finding.code == rule.code
        ]
    assert {finding.code for finding in found["Bad"]} == {rule.code}
    assert [(finding.code, str(finding.location)) for finding in found["Good"]] == []
    marked = {
        number
        for number, line in enumerate(examples(rule)["Bad"].splitlines(), 1)
        if re.search(rf"#.*\b{rule.code}\b", line)
    }
    lines = {finding.location.line for finding in found["Bad"] if finding.location is not None}
    assert lines == marked, "mark the line of the fault with a comment such as # SS101"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_finding_has_evidence_and_a_repair(rule, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(examples(rule)["Bad"])
    finding = next(each for each in lint([path]).findings if each.code == rule.code)
    assert finding.summary
    assert finding.consequence
    assert finding.repair
    assert finding.location is not None
    assert finding.location.column > 0


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_fault_is_found_at_its_line(case):
    found = [(each.code, each.location.line) for each in reported([case / "buggy.py"]) if each.location is not None]
    assert any(line in faulty_lines(case) for _, line in found), (found, sorted(faulty_lines(case)))


@pytest.mark.slow
@pytest.mark.parametrize("script", CORRECT, ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_nothing_is_found_in_a_correct_script(script):
    assert [(each.code, str(each.location), each.summary) for each in reported([script])] == []


def test_the_shared_corpus_is_complete():
    shared = {case.name for case in FAULTS if case.parent.name == "shared"}
    assert len(shared) == 23


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["recipes", "tests/scripts", "benchmarks", "src/samestep"])
def test_nothing_is_found_in_our_own_scripts(folder):
    assert [(each.code, str(each.location)) for each in reported([REPOSITORY / folder])] == []
