"""The corpus: each fault is found at its line, and nothing is found in repaired and correct scripts.

tests/corpus/shared was given to the project; tests/corpus/new was written for it before the checks had seen it. Every
folder has a faulty script, its repair and meta.json, or a correct script that looks suspicious.
"""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from samestep.verify import verify
from samestep.verify.checks import CHECKS

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
CASES = sorted(path.parent for path in CORPUS.glob("*/*/meta.json"))
COMPOUND = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


def meta(case: Path) -> dict:
    return json.loads((case / "meta.json").read_text())


def ranks(case: Path) -> int:
    """The number of ranks on which a fault shows."""
    options = dict(option.split("=") for option in meta(case)["run"].split())
    return int(options["--nproc_per_node"]) * int(options.get("--nnodes", 1))


def is_visible(case: Path) -> bool:
    """Whether a fault shows when the script runs: not all do on CPUs."""
    return (case / "buggy.py").exists() and meta(case)["dynamic"] and meta(case)["verify"] is not None


FAULTS = [case for case in CASES if is_visible(case)]
CORRECT = [case / name for case in CASES for name in ("fixed.py", "script.py") if (case / name).exists()]


def faulty_lines(case: Path) -> range:
    """The lines of the faulty statement; of a compound one only its first line."""
    line = meta(case)["line"]
    nodes = ast.walk(ast.parse((case / "buggy.py").read_text()))
    simple = [node for node in nodes if isinstance(node, ast.stmt) and not isinstance(node, COMPOUND)]
    around = [node for node in simple if node.lineno <= line <= (node.end_lineno or node.lineno)]
    first, last = (around[0].lineno, around[0].end_lineno or line) if around else (line, line)
    return range(first, last + 1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_fault_is_found_at_its_line(case, interpreters):
    expected = meta(case)
    strict = expected.get("world_contract", False)
    verdict = verify(case / "buggy.py", interpreters=interpreters, strict=strict, nproc=ranks(case))
    found = [(each.code, each.location.line if each.location else None) for each in verdict.findings]
    assert expected["verify"]["code"] in [code for code, _ in found], (found, verdict.failure)
    if expected["verify"].get("line", True):
        assert any(line in faulty_lines(case) for code, line in found if code == expected["verify"]["code"]), found


@pytest.mark.parametrize("script", CORRECT, ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_nothing_is_found_in_a_correct_script(script, interpreters):
    verdict = verify(script, interpreters=interpreters, nproc=ranks(script.parent))
    assert [(each.code, str(each.location), each.summary) for each in verdict.findings] == []
    assert verdict.failure == ""


def test_the_corpus_is_complete():
    shared = [case for case in FAULTS if case.parent.name == "shared"]
    assert len(shared) == 25
    lines = Counter(meta(case)["verify"].get("line", True) for case in shared)
    assert lines[True] >= 22


def test_every_check_has_a_fault_in_the_corpus():
    covered = {meta(case)["verify"]["code"] for case in FAULTS}
    assert {check.code for check in CHECKS} - covered == set(NOT_IN_THE_CORPUS)


NOT_IN_THE_CORPUS = {
    "SS207": "a legitimate choice, tests/verify/test_strict.py",
    "SS209": "a legitimate choice, tests/verify/test_strict.py",
    "SS306": "takes as long as the timeout, tests/verify/test_worlds.py",
}
