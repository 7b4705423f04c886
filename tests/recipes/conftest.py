"""Fixtures for the tests of recipes: models, and a working folder outside of the repository."""

import fcntl
from pathlib import Path

import pytest

from tests.recipes.trained import truncated_models


@pytest.fixture(scope="session")
def models(model_cache) -> dict[int, Path]:
    """SmolLM2 by its number of layers: 1 and 2 are truncated, 30 is the full model; one worker converts it for all."""
    with pytest.MonkeyPatch.context() as patch, (model_cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(model_cache))
        return truncated_models(model_cache)


@pytest.fixture(autouse=True)
def _separate_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # torch sets this permanently when transformers is first imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
