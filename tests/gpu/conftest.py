"""Tests that need a CUDA device; without one each is skipped with a word."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_a_gpu_in_a_folder_of_its_own(tmp_path, tmp_path_factory, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here: run tests/gpu on a machine with one")
    monkeypatch.chdir(tmp_path)
    # torch sets this for good when it first thinks of compiling
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes would outlive the test
