"""Recipes of tests write their folders beside the test's other files, not into the repository."""

from pathlib import Path

import pytest

from samestep.assets import smollm2


@pytest.fixture(scope="session")
def smollm2_by_layers(tmp_path_factory) -> dict[int, Path]:
    """SmolLM2, and cuts of it: real words and widths, quick to compute with, and no longer good models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        return {layers: smollm2(layers) for layers in (1, 2, 30)}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
