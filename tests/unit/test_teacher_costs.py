"""Placements of a teacher: memory and time of each, and which one is chosen."""

import json
from dataclasses import replace

import pytest

from samestep.errors import PlanError
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.teacher_costs import TeacherProfile, TeacherSetup, compare_placements, teacher_rows
from tests.unit.plan_examples import GIB, cluster

TEN = {"gpu", "cpu", "balanced", "sequential", "offload", "disk", "sharded", "served", "cached", "custom"}
# 60 billion parameters in bfloat16, 60 layers, 1,024 tokens with 2 FLOPs per parameter, a vocabulary of 50,000
SIXTY = TeacherProfile(
    bytes=120 * 10**9,
    largest_layer=2 * 10**9,
    flops_per_sample=2 * 60e9 * 1024,
    output_per_sample=1024 * 50_000 * 2,
)
SMALL = TeacherProfile(bytes=2 * GIB, largest_layer=GIB // 10, flops_per_sample=1e12, output_per_sample=1000)


def compare(gpus, teacher, ranks, global_batch=64, micro_batch=2, nodes=1, **rest):
    on = parse_cluster_spec(gpus, nodes) if isinstance(gpus, str) else gpus
    found = compare_placements(TeacherSetup(on, ranks, global_batch, micro_batch, **rest), teacher)
    assert {placement.name for placement in found.placements} == TEN
    assert all(placement.reason for placement in found.placements)
    return found, {placement.name: placement for placement in found.placements}


def test_a_teacher_that_fits_is_copied_to_every_gpu():
    found, each = compare("h100:4", SMALL, 4)
    assert found.chosen is each["gpu"] is found.placements[0]
    assert each["gpu"].per_gpu == 2 * GIB + 2 * 1000
    assert each["gpu"].reason == "fastest placement that fits"
    assert each["custom"].reason == "your own device map: never chosen automatically"
    assert not each["custom"].fits


def test_sixty_billion_parameters_are_sharded_instead_of_computed_on_the_cpu():
    on = replace(parse_cluster_spec("h100:4"), host_memory=1000 * GIB)
    found, each = compare(on, SIXTY, 4)
    assert found.chosen.name == "sharded"
    assert each["cpu"].fits
    # 64 samples of 1.2e14 FLOPs on 32 cores with 5e10 FLOP/s: more than an hour per step
    assert each["cpu"].seconds == pytest.approx(64 * SIXTY.flops_per_sample / (32 * 5e10), rel=0.01)
    assert each["cpu"].seconds > 3600
    assert each["cpu"].reason.endswith("times as slow as sharded")
    assert each["gpu"].reason.startswith("does not fit: 111.9 GiB needed, 74.4 GiB free per device")
    assert each["sharded"].per_gpu == pytest.approx(30e9 + 4e9 + 2 * SIXTY.output_per_sample)


def test_cpu_placement_needs_one_copy_per_node_for_any_number_of_ranks():
    for ranks in (1, 2, 4):
        assert compare("h100:4", SMALL, ranks)[1]["cpu"].per_node == pytest.approx(2 * GIB, rel=1e-4)


def test_one_rank_with_several_gpus_distributes_the_layers():
    found, each = compare("h100:4", SIXTY, 1)
    assert found.chosen.name == "balanced"
    assert each["balanced"].per_gpu == pytest.approx(30e9 + 2e9 + 2 * SIXTY.output_per_sample)
    assert each["sequential"].per_gpu > each["balanced"].per_gpu
    assert each["sharded"].reason == "needs at least 2 ranks"
    assert each["served"].reason == "needs at least 2 ranks"


def test_device_maps_do_not_apply_if_each_rank_has_one_gpu():
    each = compare("h100:4", SMALL, 4)[1]
    assert each["balanced"].reason == each["sequential"].reason == "each rank has one device: the same as gpu"


def test_offload_is_chosen_with_a_single_gpu():
    on = replace(parse_cluster_spec("h100:1"), host_memory=500 * GIB)
    found, each = compare(on, SIXTY, 1)
    assert found.chosen.name == "offload"
    # 32 forward passes, each bound by the transfer of 120 GB over PCIe
    assert each["offload"].seconds == pytest.approx(32 * 120e9 / (64e9 * 0.8))
    assert each["offload"].per_node == SIXTY.bytes


def test_the_disk_is_for_teachers_larger_than_host_memory():
    found, each = compare(replace(parse_cluster_spec("h100:1"), host_memory=64 * GIB), SIXTY, 1)
    assert found.chosen.name == "disk"
    assert each["offload"].reason == "does not fit: 111.8 GiB of host memory needed, 57.6 GiB free per node"
    assert each["disk"].seconds == pytest.approx(32 * 120e9 / 2e9)


def test_a_served_teacher_computes_for_all_ranks_on_one_rank():
    each = compare("h100:4", SMALL, 4)[1]
    assert each["served"].seconds > 3.9 * each["gpu"].seconds


def test_memory_that_training_uses_is_not_free_for_the_teacher():
    assert compare("h100:4", SMALL, 4, used_per_gpu=73 * GIB)[0].chosen.name != "gpu"


def test_cached_is_never_chosen_and_states_the_time_of_later_epochs():
    found, each = compare("h100:2", SMALL, 2)
    assert each["cached"].seconds == found.chosen.seconds
    assert not each["cached"].fits
    # 64 samples per node with 1000 bytes each, from a disk with 2 GB/s
    reason = "choose it yourself if a sample has the same inputs in every epoch"
    assert each["cached"].reason == f"{reason}: later epochs take 0.032 ms per step"
    assert compare("h100:2", replace(SMALL, output_per_sample=0), 2)[1]["cached"].reason == reason


def test_without_a_gpu_one_copy_serves_all_ranks_of_the_node():
    found, each = compare(replace(parse_cluster_spec("cpu:4"), host_memory=6 * GIB), SMALL, 4)
    assert found.chosen.name == "cpu"
    assert each["gpu"].reason.startswith("does not fit: 8.0 GiB of host memory needed")
    assert each["offload"].reason == "needs a GPU to load layers to"


def test_without_a_gpu_a_served_teacher_is_in_memory_once():
    on = replace(parse_cluster_spec("cpu:4"), host_memory=6 * GIB)
    each = compare(on, SMALL, 4)[1]
    assert each["served"].fits
    assert (each["served"].per_gpu, each["served"].per_node) == (0, 2 * GIB + 2 * 1000)
    too_small = compare(replace(on, host_memory=GIB), SMALL, 4)[1]
    assert too_small["served"].reason.startswith("does not fit: 2.0 GiB of host memory needed, 921.6 MiB free per node")


def test_no_placement_is_chosen_if_nothing_fits():
    found, each = compare(cluster(1, gib=1, host_memory=GIB), replace(SIXTY, largest_layer=100 * GIB), 1)
    assert found.chosen is None
    assert each["cached"].reason == "no placement fits for the first epoch, which fills the cache"


def test_a_teacher_plan_can_be_printed_and_converted_to_json():
    found, _ = compare("h100:4", SMALL, 4)
    assert teacher_rows(found)[0][:3] == ("gpu", "2.0 GiB", "0 B")
    assert json.loads(json.dumps(found.to_json()))["chosen"] == "gpu"


def test_an_empty_setup_raises():
    with pytest.raises(PlanError, match="A teacher needs at least 1 rank"):
        compare_placements(TeacherSetup(cluster(1), 1, 0, 1), SMALL)
