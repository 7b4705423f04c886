"""Cluster specifications: names, JSON descriptions, and the hardware of this machine."""

import json
from dataclasses import replace

import pytest

from samestep.environment.hardware import Cores, Gpu, GpuLink, Hardware
from samestep.errors import PlanError
from samestep.planner.cluster_discovery import local_cluster, peer_bandwidth
from samestep.planner.cluster_spec import EXAMPLE, KNOWN_DEVICES, parse_cluster_spec

GIB = 2**30


@pytest.mark.parametrize(
    ("gpus", "nodes", "device", "count"),
    [
        *(("h100:4", 1, "h100", 4), ("h100", 1, "h100", 1), ("a100-40gb:2", 3, "a100-40gb", 2)),
        *(("cpu:8", 1, "cpu", 8), ("mps", 1, "mps", 1), ("g5", 1, "a10g", 4), ("p3", 2, "v100", 8)),
        *(("h200:8", 4, "h200", 8), ("rtx4090:4", 1, "rtx4090", 4)),
    ],
)
def test_names_and_presets_are_parsed_with_their_counts(gpus, nodes, device, count):
    found = parse_cluster_spec(gpus, nodes)
    assert (found.device, found.devices_per_node, found.nodes) == (KNOWN_DEVICES[device].device, count, nodes)
    assert found.devices == count * nodes
    assert found.host_memory == KNOWN_DEVICES[device].host_memory * count


def test_a_cluster_has_a_short_label():
    assert parse_cluster_spec("h100:4").label == "4 x h100"
    assert parse_cluster_spec("h100:4", 2).label == "2 x 4 x h100"


def test_a_device_can_be_described_in_json(tmp_path):
    found = parse_cluster_spec(EXAMPLE)
    assert (found.device.name, found.device.kind, found.devices_per_node) == ("mygpu", "cuda", 4)
    assert found.device.memory == int(47.5 * GIB)
    assert found.device.peak_flops == {"bfloat16": 180e12, "float32": 90e12}
    assert (found.device.bandwidth, found.intra_node_bandwidth) == (960e9, 32e9)
    (tmp_path / "mine.json").write_text(EXAMPLE)
    assert replace(parse_cluster_spec(str(tmp_path / "mine.json"), 2), source="") == replace(
        parse_cluster_spec(EXAMPLE, 2),
        source="",
        device=replace(found.device, source=str(tmp_path / "mine.json")),
    )


def example_with(**changes):
    return json.dumps({**json.loads(EXAMPLE), **changes})


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (
            "x1:4",
            "--gpus x1:4: unknown device 'x1'. Use one of b200, h200, h100-pcie, h100-nvl, h100, a1",
        ),
        (
            "g5:2",
            "--gpus g5:2: g5 is a node type with 4 x a10g and takes no count. Pass g5 with --nodes for several nodes, "
            "or a10g:COUNT.",
        ),
        ("mps:2", "--gpus mps:2: a run uses an Apple GPU with one rank only. Pass `mps` without a count."),
        (
            "local:2",
            "--gpus local:2: `local` means the GPUs of this machine and takes no count.",
        ),
        (
            "h100:",
            "--gpus h100:: the number of devices per node must be from 1 to 4096, got ''. Pass for example h100:4.",
        ),
        ("h100:x", "--gpus h100:x: the number of devices per node must be from 1 to 4096, got x."),
        ("h100:0", "--gpus h100:0: the number of devices per node must be from 1 to 4096, got 0."),
        ("none.json", "--gpus none.json cannot be read (No such file or directory). Pass a file that contains, for ex"),
        ("{x", "the JSON of --gpus is not valid JSON ("),
        (
            '{"name": "x"}',
            "the JSON of --gpus lacks memory_gib, bandwidth_gbs, tflops. The fields are name, memory_gib, ",
        ),
        (example_with(ram=1), "the JSON of --gpus has unknown fields: ram. The fields are "),
        (example_with(count=0), "the JSON of --gpus: count must be an integer from 1 to 1,000,000,000, got 0."),
        (example_with(count=1.5), "the JSON of --gpus: count must be an integer from 1 to 1,000,000,000, got 1.5."),
        (
            example_with(memory_gib="48"),
            "the JSON of --gpus: memory_gib must be a number from 1e-06 to 1,000,000,000, got '48'.",
        ),
        (
            example_with(interconnect_gbs=True),
            "the JSON of --gpus: interconnect_gbs must be a number from",
        ),
        (
            example_with(memory_gib=float("inf")),
            "the JSON of --gpus: memory_gib must be a number from 1e-06 to 1,000,000,000, got inf.",
        ),
        (example_with(kind="mps"), "the JSON of --gpus: a run uses an Apple GPU with one rank only"),
        (example_with(kind="tpu"), "the JSON of --gpus: kind must be one of cuda, mps, cpu, got 'tpu'."),
        (
            example_with(tflops={"int8": 5}),
            "the JSON of --gpus: tflops must map dtypes to dense TFLOP/s, got {'int8': 5}. ",
        ),
        (
            example_with(tflops=90),
            "the JSON of --gpus: tflops must map dtypes to dense TFLOP/s, got 90. Give float32, and tf32, bfloat16, ",
        ),
    ],
)
def test_invalid_cluster_specs_are_explained(gpus, message):
    with pytest.raises(PlanError) as error:
        parse_cluster_spec(gpus)
    assert str(error.value).startswith(message)


def test_an_unknown_name_lists_the_known_devices_and_a_json_example(tmp_path):
    with pytest.raises(PlanError) as error:
        parse_cluster_spec("x1")
    assert all(name in str(error.value) for name in (*KNOWN_DEVICES, "local", "g5", "p3"))
    assert EXAMPLE in str(error.value)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(PlanError, match=r"list\.json is not a JSON object. Write, for example, \{"):
        parse_cluster_spec(str(tmp_path / "list.json"))


def test_a_run_cannot_use_several_macs():
    with pytest.raises(PlanError, match=r"^--gpus mps: a run uses an Apple GPU with one rank only"):
        parse_cluster_spec("mps", 2)


def test_the_number_of_nodes_must_be_positive():
    with pytest.raises(PlanError, match=r"^--nodes must be at least 1, got 0\.$"):
        parse_cluster_spec("h100:4", 0)


def hardware(gpus=(), links=()):
    return Hardware(
        Cores(16, 32, "bound"), 64 * GIB, 48 * GIB, 8 * GIB, 7 * GIB, len(gpus), True, tuple(gpus), tuple(links)
    )


def gpu(index=0, name="NVIDIA H100 80GB HBM3", total=79, free=78, capability=(9, 0)):
    return Gpu(index, name, total * GIB, free * GIB, capability)


def test_a_local_gpu_has_detected_memory_and_tabulated_flops():
    found = local_cluster(hardware([gpu(0, free=40), gpu(1)], [GpuLink(0, 1, "NV18")]))
    assert (found.devices_per_node, found.nodes, found.cores, found.shm) == (2, 1, 16, 8 * GIB)
    assert (found.device.memory, found.device.memory_free) == (
        79 * GIB,
        40 * GIB,
    )  # of the fuller GPU
    assert found.device.peak_flops == KNOWN_DEVICES["h100"].device.peak_flops
    assert found.intra_node_bandwidth == 450e9
    assert found.host_memory == 48 * GIB
    assert found.source == "this machine: 2 x NVIDIA H100 80GB HBM3"
    assert found.device.source == KNOWN_DEVICES["h100"].device.source  # the source of the FLOP/s, without the machine


def test_the_detected_memory_of_a_known_gpu_is_used():
    assert local_cluster(hardware([gpu(name="NVIDIA H100 NVL", total=94, free=93)])).device.memory == 94 * GIB


def test_a_mig_instance_has_its_own_memory_and_a_fraction_of_the_flops():
    found = local_cluster(hardware([gpu(name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", total=19, free=19)])).device
    assert found.memory == 19 * GIB
    assert found.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert found.peak_flops["bfloat16"] == pytest.approx(312e12 * 3 / 7)


def test_an_unknown_gpu_says_what_it_is_estimated_as():
    found = local_cluster(hardware([gpu(name="NVIDIA X1", capability=(8, 6))])).device
    assert found.name == "NVIDIA X1"
    assert "unknown GPU, estimated as a10g; measure it with `samestep plan --calibrate`" in found.source


def test_the_slowest_connection_determines_the_bandwidth():
    links = [GpuLink(0, 1, "NV4"), GpuLink(0, 2, "SYS"), GpuLink(1, 2, "PIX")]
    assert peer_bandwidth(links, [], pcie=32e9) == 16e9
    assert peer_bandwidth(links[:1], [], pcie=32e9) == 100e9
    assert peer_bandwidth([GpuLink(0, 1, "NV18")], [gpu(capability=(10, 0))], pcie=64e9) == 900e9
    assert peer_bandwidth([], [], pcie=32e9) == 32e9


def test_without_a_gpu_all_cores_are_one_device():
    found = local_cluster(hardware())
    assert (found.device.kind, found.devices_per_node) == ("cpu", 1)
    assert found.device.peak_flops["float32"] == pytest.approx(16 * 0.1e12)
    assert found.device.memory_free == 48 * GIB
    apple = local_cluster(hardware(), mps=True)
    assert (apple.device.kind, apple.device.memory) == (
        "mps",
        48 * GIB,
    )  # three quarters of 64 GiB
    assert local_cluster(replace(hardware(), memory_total=24 * GIB), mps=True).device.memory == 16 * GIB
