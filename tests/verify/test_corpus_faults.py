"""The first half of the faults of the corpus: each is found at its line."""

import pytest

from tests.verify.corpus import FAULTS, check_fault

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", FAULTS[::2], ids=lambda case: case.name)
def test_a_fault_is_found_at_its_line(case, interpreters):
    check_fault(case, interpreters)
