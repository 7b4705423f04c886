"""Calibration: measured numbers are plausible, saved per device, and replace those of data sheets."""

import json

import pytest
import torch

from samestep.cli.main import main
from samestep.planner.calibration import (
    Calibration,
    all_reduce_bandwidth,
    apply_calibration,
    calibrate,
    calibration_path,
    read_calibration,
    save_calibration,
)
from samestep.planner.cluster_spec import parse_cluster_spec


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


@pytest.mark.slow
def test_the_cpu_is_measured_and_the_fp32_matmul_precision_restored():
    reported, before = [], torch.get_float32_matmul_precision()
    found = calibrate(torch.device("cpu"), reported.append)
    assert torch.get_float32_matmul_precision() == before
    assert (found.device, found.device_count, found.all_reduce_bandwidth) == ("cpu", 1, None)
    works = [work for work, _ in found.matmul_flops["float32"]]
    assert works == sorted(works)
    assert works[-1] == 2 * 1024**3
    assert all(1e8 < rate < 1e14 for _, rate in found.matmul_flops["float32"])
    assert 1e8 < found.copy_bandwidth < 1e13
    assert 1e8 < found.host_bandwidth < 1e13
    assert 1e-8 < found.launch_seconds < 1e-2
    assert reported == ["matrix products", "copies"]


@pytest.mark.slow
def test_all_reduce_bandwidth_is_measured_between_processes():
    assert 1e6 < all_reduce_bandwidth(2, "gloo", 2**22) < 1e12


@pytest.mark.slow
def test_the_command_saves_the_calibration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", "--calibrate"]) == 0
    out = capsys.readouterr().out
    assert "matrix products in TFLOP/s: float32" in out
    assert str(tmp_path) in out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        assert read_calibration("cpu", {"XDG_CACHE_HOME": str(tmp_path)}) is not None


MEASURED = Calibration(
    device="NVIDIA H100 80GB HBM3",
    device_count=2,
    matmul_flops={"bfloat16": ((1e9, 1e13), (1e12, 6e14))},
    copy_bandwidth=2.9e12,
    host_bandwidth=5.2e10,
    all_reduce_bandwidth=3.1e11,
    launch_seconds=4e-6,
    date="2025-01-31",
)


def test_a_calibration_is_saved_and_read_per_device(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert read_calibration(MEASURED.device, environ) is None
    path = save_calibration(MEASURED, environ)
    assert path == calibration_path(MEASURED.device, environ)
    assert read_calibration(MEASURED.device, environ) == MEASURED
    assert read_calibration("cpu", environ) is None
    path.write_text("{}")
    assert read_calibration(MEASURED.device, environ) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("copy_bandwidth", "fast"),
        ("copy_bandwidth", float("nan")),
        ("host_bandwidth", 0),
        ("launch_seconds", None),
        ("all_reduce_bandwidth", -1),
        ("matmul_flops", {"float32": []}),
        ("matmul_flops", {"float32": [[1, float("inf")]]}),
        ("matmul_flops", []),
    ],
)
def test_a_calibration_with_impossible_numbers_is_ignored(name, value, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = save_calibration(MEASURED, environ)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert read_calibration(MEASURED.device, environ) is None


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("samestep.planner.calibration.calibrate", None)
    assert main(["plan", "--calibrate"]) == 2
    assert capsys.readouterr().err == (
        f"samestep: The calibration cannot be saved to {tmp_path}/file/samestep (a file is where a folder is needed: "
        "choose another folder). Set XDG_CACHE_HOME to a folder that you can write to.\n"
    )


def test_measured_numbers_replace_those_of_the_data_sheet():
    two = parse_cluster_spec("h100:2")
    found = apply_calibration(two, MEASURED)
    assert found.device.measured_flops == MEASURED.matmul_flops
    assert (found.device.copy_bandwidth, found.device.launch_seconds) == (2.9e12, 4e-6)
    assert (found.host_bandwidth, found.intra_node_bandwidth, found.all_reduce_measured) == (5.2e10, 3.1e11, True)
    assert found.device.source.endswith("; measured on 2025-01-31")
    assert apply_calibration(two, None) is two


def test_an_all_reduce_over_another_number_of_devices_is_ignored():
    found = apply_calibration(parse_cluster_spec("h100:4"), MEASURED)
    assert (found.intra_node_bandwidth, found.all_reduce_measured) == (450e9, False)
