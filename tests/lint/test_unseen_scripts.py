"""Scripts that were written before anybody saw what lint says about them: helper modules, classes, decorators.

tests/corpus/reading has faults with their repairs, in rounds of 12, 49, 7, 20 and 8, and 16 correct scripts, with the
lines that a fair report names. docs/lint.md has the first score of each round, before the rules were improved.
"""

import json
from pathlib import Path

import pytest

from samestep.lint.linter import lint

FOLDER = Path(__file__).resolve().parents[1] / "corpus" / "reading"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
CORRECT = sorted([*FOLDER.glob("fault-*/fixed.py"), *FOLDER.glob("clean-*/script.py")])


def reported(path: Path) -> list[tuple[str, int]]:
    result = lint([path])
    assert result.problems == {}
    assert result.shortened == []
    return [
        (each.code, each.location.line)
        for each in result.findings
        if each.severity != "note" and each.location is not None
    ]


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_a_fault_is_found_at_its_line(case):
    lines = [line for _, line in reported(FOLDER / case / "buggy.py")]
    assert set(lines) & set(EXPECTED[case]["lines"]), lines


@pytest.mark.slow
@pytest.mark.parametrize("script", CORRECT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_is_found_in_a_correct_script(script):
    assert reported(script) == []


def test_all_cases_are_there():
    assert len(EXPECTED) == 96
    assert len(CORRECT) == 112


@pytest.mark.parametrize(
    "names",
    [
        "[name for name in os.listdir('images') if name.endswith('.jpg')]",
        "[(name, 'a photo') for name in Path('images').iterdir() if name.is_file()]",
    ],
)
def test_the_order_of_files_is_a_warning_also_through_a_comprehension(tmp_path, names):
    path = tmp_path / "train.py"
    path.write_text(
        "import os\nfrom pathlib import Path\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"names = {names}\n"
        "numbers = {name: number for number, name in enumerate(names)}\n"
    )
    found = [(each.code, each.severity, each.location.line) for each in lint([path]).findings if each.location]
    assert found == [("SS106", "warning", 5)]
