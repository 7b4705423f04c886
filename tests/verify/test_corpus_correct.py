"""The second half of the repaired and correct scripts of the corpus: nothing is found in them."""

import pytest

from tests.verify.corpus import CORRECT, check_correct

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", CORRECT[1::2], ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_nothing_is_found_in_a_correct_script(script, interpreters):
    check_correct(script, interpreters)
