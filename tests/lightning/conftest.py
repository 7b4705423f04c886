"""Tests run in a temporary folder, so that Lightning does not write into the repository."""

import pytest


@pytest.fixture(autouse=True)
def _run_in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
