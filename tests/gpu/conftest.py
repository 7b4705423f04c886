"""Fixtures for tests that need a CUDA device; without one they are skipped."""

import os
from pathlib import Path

import pytest
import torch

# Tests start processes in other folders: what is relative to this one must be found from there too.
PYTHONPATH = os.pathsep.join(str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(":") if path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip before the fixtures of a module train anything."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device: run tests/gpu on a machine with one")


@pytest.fixture(autouse=True)
def _on_a_gpu_in_a_separate_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if PYTHONPATH:
        monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    # torch sets this permanently when it first considers compiling
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes would outlive the test
    for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):  # Inductor sets them for good
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
