"""The table of known devices."""

import re

import pytest

from samestep.planner.cluster_spec import (
    ALIASES,
    KNOWN_DEVICES,
    PRESETS,
    find_device,
    match_gpu,
    mig_fraction,
    parse_cluster_spec,
)
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_every_device_tells_its_figures_and_their_source(name):
    sheet = KNOWN_DEVICES[name]
    device = sheet.device
    assert device.kind in ("cuda", "mps", "cpu")
    assert device.memory == device.memory_free > 2**30
    assert device.bandwidth > 1e9
    assert device.peak_flops["float32"] > 1e10
    assert set(device.peak_flops) <= {"float32", "tf32", "bfloat16", "float16"}
    assert len(device.source) > 15
    assert min(sheet.intra_node_bandwidth, sheet.host_bandwidth, sheet.inter_node_bandwidth) > 0


def test_memory_is_what_a_process_finds_not_what_is_printed_on_the_box():
    boxes = {"h100": 80, "a100-40gb": 40, "a10g": 24, "v100": 16, "rtx4090": 24, "h200": 141, "b200": 192, "t4": 16}
    for name, gigabytes in boxes.items():
        assert 0.9 * gigabytes * 1e9 < KNOWN_DEVICES[name].device.memory < gigabytes * 2**30, name


def test_rates_are_dense():
    half = {"h100": 989e12, "a100": 312e12, "a10g": 70e12, "l4": 121e12, "t4": 65e12, "v100": 125e12}
    assert {name: KNOWN_DEVICES[name].device.peak_flops["float16"] for name in half} == half


def test_gpus_before_ampere_have_neither_bfloat16_nor_tf32():
    for name in ("v100", "v100-32gb", "t4"):
        assert not {"bfloat16", "tf32"} & set(KNOWN_DEVICES[name].device.peak_flops)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100"),
        ("H100-80GB", "h100"),
        ("nvidia_a100_80gb", "a100"),
        ("4090", "rtx4090"),
        ("A100-40GB", "a100-40gb"),
    ],
)
def test_names_are_understood_as_people_type_them(typed, name):
    assert find_device(typed).device.name == name


def test_other_names_and_presets_lead_to_known_devices():
    assert all(name in KNOWN_DEVICES for name in ALIASES.values())
    assert PRESETS == {"g5": ("a10g", 4), "p3": ("v100", 8)}
    assert all(name in KNOWN_DEVICES for name, _ in PRESETS.values())
    assert find_device("h1000") is None


@pytest.mark.parametrize(
    ("cuda", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_cuda_gives_it(cuda, name):
    sheet, own = match_gpu(cuda, (9, 0))
    assert (sheet.device.name, own) == (name, True)


def test_an_unknown_gpu_is_reckoned_as_a_slow_one_of_its_generation():
    assert [match_gpu("NVIDIA X1", at)[0].device.name for at in ((8, 6), (8, 7), (12, 0), (5, 0))] == [
        *("a10g", "a10g", "rtx4090", "v100")
    ]
    assert not match_gpu("NVIDIA X1", (8, 6))[1]


def test_a_slice_has_its_part_of_the_cores():
    assert mig_fraction("NVIDIA A100-SXM4-40GB MIG 1g.5gb") == pytest.approx(1 / 7)
    assert mig_fraction("NVIDIA A100-SXM4-40GB") == 1


def told(rate):
    return "-" if rate is None else f"{rate:g}"


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_the_page_tells_what_the_table_has(name):
    sheet = KNOWN_DEVICES[name]
    device, dtypes = sheet.device, ("bfloat16", "float16", "tf32", "float32")
    rates = [device.peak_flops[dtype] / 1e12 if dtype in device.peak_flops else None for dtype in dtypes]
    links = [rate / 1e9 for rate in (sheet.intra_node_bandwidth, sheet.host_bandwidth, sheet.inter_node_bandwidth)]
    figures = [device.memory / 2**30, device.bandwidth / 1e9, *rates, *links]
    source = device.source.removesuffix("; memory as torch reports it")
    row = " | ".join([f"`{name}`", *map(told, figures), source])
    assert f"\n| {row} |\n" in (REPOSITORY / "docs" / "plan.md").read_text()


def test_the_device_of_ones_own_on_the_page_is_one():
    page = (REPOSITORY / "docs" / "plan.md").read_text()
    found = parse_cluster_spec(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert (found.device.name, found.devices_per_node, found.cores) == ("mygpu", 4, 64)
