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
def test_every_device_has_plausible_numbers_and_a_source(name):
    known = KNOWN_DEVICES[name]
    device = known.device
    assert device.kind in ("cuda", "mps", "cpu")
    assert device.memory == device.memory_free > 2**30
    assert device.bandwidth > 1e9
    assert device.peak_flops["float32"] > 1e10
    assert set(device.peak_flops) <= {"float32", "tf32", "bfloat16", "float16"}
    assert len(device.source) > 15
    assert min(known.intra_node_bandwidth, known.host_bandwidth, known.inter_node_bandwidth) > 0


def test_memory_is_what_a_process_can_allocate():
    printed = {"h100": 80, "a100-40gb": 40, "a10g": 24, "v100": 16, "rtx4090": 24, "h200": 141, "b200": 192, "t4": 16}
    for name, gigabytes in printed.items():
        assert 0.9 * gigabytes * 1e9 < KNOWN_DEVICES[name].device.memory < gigabytes * 2**30, name


def test_flops_are_dense():
    half = {"h100": 989e12, "a100": 312e12, "a10g": 70e12, "l4": 121e12, "t4": 65e12, "v100": 125e12}
    assert {name: KNOWN_DEVICES[name].device.peak_flops["float16"] for name in half} == half


def test_gpus_before_ampere_have_neither_bfloat16_nor_tf32():
    for name in ("v100", "v100-32gb", "t4"):
        assert not {"bfloat16", "tf32"} & set(KNOWN_DEVICES[name].device.peak_flops)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100"),
        ("H100-80GB", "h100"),
        ("nvidia_a100_80gb", "a100"),
        ("4090", "rtx4090"),
        ("A100-40GB", "a100-40gb"),
    ],
)
def test_device_names_are_case_insensitive_and_have_aliases(alias, name):
    assert find_device(alias).device.name == name


def test_aliases_and_presets_refer_to_known_devices():
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
def test_a_gpu_is_recognized_by_its_cuda_name(cuda, name):
    known, own = match_gpu(cuda, (9, 0))
    assert (known.device.name, own) == (name, True)


def test_an_unknown_gpu_is_estimated_as_a_slow_one_of_its_generation():
    assert [match_gpu("NVIDIA X1", at)[0].device.name for at in ((8, 6), (8, 7), (12, 0), (5, 0))] == [
        *("a10g", "a10g", "rtx4090", "v100")
    ]
    assert not match_gpu("NVIDIA X1", (8, 6))[1]


def test_a_mig_instance_has_a_fraction_of_the_cores():
    assert mig_fraction("NVIDIA A100-SXM4-40GB MIG 1g.5gb") == pytest.approx(1 / 7)
    assert mig_fraction("NVIDIA A100-SXM4-40GB") == 1


def cell(rate):
    return "-" if rate is None else f"{rate:g}"


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_the_documentation_lists_every_known_device(name):
    known = KNOWN_DEVICES[name]
    device, dtypes = known.device, ("bfloat16", "float16", "tf32", "float32")
    flops = [device.peak_flops[dtype] / 1e12 if dtype in device.peak_flops else None for dtype in dtypes]
    bandwidths = [rate / 1e9 for rate in (known.intra_node_bandwidth, known.host_bandwidth, known.inter_node_bandwidth)]
    numbers = [device.memory / 2**30, device.bandwidth / 1e9, *flops, *bandwidths]
    source = device.source.removesuffix("; memory as torch reports it")
    row = " | ".join([f"`{name}`", *map(cell, numbers), source])
    assert f"\n| {row} |\n" in (REPOSITORY / "docs" / "plan.md").read_text()


def test_the_device_description_in_the_documentation_is_valid():
    page = (REPOSITORY / "docs" / "plan.md").read_text()
    found = parse_cluster_spec(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert (found.device.name, found.devices_per_node, found.cores) == ("mygpu", 4, 64)
