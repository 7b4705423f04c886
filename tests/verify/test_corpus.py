"""The corpus: nothing is found in the first half of the repaired and correct scripts, and the corpus is complete."""

from collections import Counter

import pytest

from samestep.verify.checks import CHECKS
from tests.verify.corpus import CORRECT, FAULTS, check_correct, meta

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", CORRECT[::2], ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_nothing_is_found_in_a_correct_script(script, interpreters):
    check_correct(script, interpreters)


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
}
