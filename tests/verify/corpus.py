"""The corpus of faulty and correct scripts, and what a test expects of verify for each; four test files share it.

tests/corpus/shared was given to the project; tests/corpus/new and verify-new were written for it before the checks had
seen them. Every folder has a faulty script, its repair and meta.json, or a correct script that looks suspicious. That
file is called verify.json if the tests of `samestep lint` do not use the folder.
"""

import ast
import json
from pathlib import Path

from samestep.verify import Interpreters, verify

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
DESCRIPTIONS = {path.parent: path for name in ("meta", "verify") for path in CORPUS.glob(f"*/*/{name}.json")}
CASES = sorted(DESCRIPTIONS)
COMPOUND = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


def meta(case: Path) -> dict:
    return json.loads(DESCRIPTIONS[case].read_text())


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


def check_fault(case: Path, interpreters: Interpreters) -> None:
    """The fault is found with its code and, unless meta.json says otherwise, at its line."""
    expected = meta(case)
    strict = expected.get("world_contract", False)
    verdict = verify(case / "buggy.py", interpreters=interpreters, strict=strict, nproc=ranks(case))
    found = [(each.code, each.location.line if each.location else None) for each in verdict.findings]
    assert expected["verify"]["code"] in [code for code, _ in found], (found, verdict.failure)
    if expected["verify"].get("line", True):
        assert any(line in faulty_lines(case) for code, line in found if code == expected["verify"]["code"]), found


def check_correct(script: Path, interpreters: Interpreters) -> None:
    """Nothing is found, and the script could be verified."""
    verdict = verify(script, interpreters=interpreters, nproc=ranks(script.parent))
    assert [(each.code, str(each.location), each.summary) for each in verdict.findings] == []
    assert verdict.failure == ""
