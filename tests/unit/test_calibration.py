"""What this machine does, measured: figures that are there, plausible, and used."""

import pytest
import torch

from samestep.cli.main import main
from samestep.planner.calibration import all_reduce_bandwidth, calibrate, read_calibration


@pytest.fixture(autouse=True)
def _torch_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


@pytest.mark.slow
def test_the_cpu_is_measured():
    said = []
    found = calibrate(torch.device("cpu"), said.append)
    assert (found.device, found.device_count, found.all_reduce_bandwidth) == ("cpu", 1, None)
    works = [work for work, _ in found.matmul_flops["float32"]]
    assert works == sorted(works)
    assert works[-1] == 2 * 1024**3
    assert all(1e8 < rate < 1e14 for _, rate in found.matmul_flops["float32"])
    assert 1e8 < found.copy_bandwidth < 1e13
    assert 1e8 < found.host_bandwidth < 1e13
    assert 1e-8 < found.launch_seconds < 1e-2
    assert said == ["matrix products", "copies"]


@pytest.mark.slow
def test_products_in_fp32_are_left_as_they_were():
    before = torch.get_float32_matmul_precision()
    calibrate(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.slow
def test_processes_reduce_together():
    assert 1e6 < all_reduce_bandwidth(2, "gloo", 2**22) < 1e12


@pytest.mark.slow
def test_the_command_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", "--calibrate"]) == 0
    out = capsys.readouterr().out
    assert "matrix products in TFLOP/s: float32" in out
    assert str(tmp_path) in out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        assert read_calibration("cpu", {"XDG_CACHE_HOME": str(tmp_path)}) is not None
