"""Plans: memory and time calculated by hand, the chosen layout, the reasons against others, and general properties."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cli.plan_command import gpu_hours, memory_bar, plan_rows, speed_ups, what_if_rows
from samestep.data.partition import Partition
from samestep.errors import PlanError
from samestep.messages import format_seconds
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.layouts import Layout, PlanOptions, estimate_memory, layouts
from samestep.planner.model_profile import MeasuredTime, Op
from samestep.planner.plan import make_plan, resolve_precision
from samestep.planner.time_model import (
    collective_seconds,
    compute_seconds,
    estimate_step_time,
    launch_seconds,
    matmul_rate,
    op_seconds,
    ring_bandwidth,
)
from tests.unit.plan_examples import DEVICE, GIB, MIB, cluster, model, peak, with_teacher

CONTEXT, CHANNELS = 600 * MIB, 400 * MIB


def parts(layout, profile, micro_batch, accumulates=False, on=None, precision="bf16"):
    return estimate_memory(
        layout, on or cluster(layout.ranks), profile, micro_batch, accumulates=accumulates, precision=precision
    )


def named(found):
    return {candidate.layout.name: candidate for candidate in found.candidates}


def test_compute_bytes_are_half_of_fp32_in_half_precision():
    profile = model(trainable={"float32": 100, "bfloat16": 10})
    assert [profile.compute_bytes(precision) for precision in ("fp32", "bf16", "fp16")] == [110, 60, 60]


def test_single_keeps_everything_on_one_device():
    found = parts(Layout("single", 1, 1), model(), 4)
    assert dict(found.components()) == {
        "weights": GIB,
        "gradients": GIB,
        "optimizer": 2 * GIB,
        "activations": 4 * GIB,
        "buckets": 0,
        "gathered": 0,
        "overhead": CONTEXT,
    }
    assert (found.total, found.host) == (8 * GIB + CONTEXT, 0)


def test_all_gradients_exist_throughout_with_ddp_and_between_micro_batches():
    profile = model(activations=peak(1, 100 * MIB))
    lone = Layout("single", 1, 1)
    # 8 samples: 800 MiB of activations are freed before there is 1 GiB of gradients and 10 MiB of temporaries
    assert parts(lone, profile, 8).activations == 10 * MIB
    assert parts(lone, profile, 8).buckets == 0
    for found in (parts(lone, profile, 8, accumulates=True), parts(Layout("ddp", 2, 1), profile, 8)):
        assert found.activations + found.buckets == 800 * MIB
        assert found.gradients == GIB


def test_fsdp_shards_weights_gradients_and_optimizer_state():
    found = parts(Layout("fsdp", 4, 4), model(fixed=GIB), 4)
    assert (found.weights, found.gradients, found.optimizer) == (GIB // 4, GIB // 4, GIB // 2)
    assert found.overhead == CONTEXT + CHANNELS
    # in bf16, autocast does not make its copies, which are half as large as the weights
    assert found.activations == 5 * GIB - GIB // 2
    # two blocks of a tenth of the weights in bf16, and a block's unsharded gradient twice in fp32
    assert found.gathered == pytest.approx(0.1 * GIB + 0.2 * GIB, abs=16)


def test_zero2_keeps_all_weights_unsharded_during_a_step():
    found = parts(Layout("zero2", 4, 4), model(), 4)
    assert found.weights == GIB // 4
    assert found.gathered == pytest.approx(0.5 * GIB + 0.2 * GIB, abs=16)


def test_accumulated_gradients_stay_unsharded_until_the_last_micro_batch():
    found = parts(Layout("fsdp", 4, 4), model(), 2, accumulates=True)
    assert found.gradients == GIB + GIB // 4


def test_offload_moves_shards_to_host_memory():
    found = parts(Layout("fsdp", 4, 4, cpu_offload=True), model(), 4)
    assert (found.weights, found.gradients, found.optimizer) == (0, 0, 0)
    assert found.host == 4 * GIB  # weights, gradients and two optimizer states of all four ranks


def test_wrapping_needs_the_shards_of_earlier_blocks_and_the_next_block_in_full():
    ten_blocks, one_part = model(), model(blocks=1)
    assert parts(Layout("single", 1, 1), ten_blocks, 4).wrap == GIB
    assert parts(Layout("ddp", 4, 1), ten_blocks, 4).wrap == GIB
    assert parts(Layout("fsdp", 4, 4), ten_blocks, 4).wrap == pytest.approx(GIB / 4 + GIB / 10, rel=1e-6)
    assert parts(Layout("fsdp", 4, 4), one_part, 4).wrap == GIB + GIB // 4
    assert parts(Layout("fsdp", 4, 4, cpu_offload=True), ten_blocks, 4).wrap == pytest.approx(GIB / 8, rel=1e-6)


def test_activation_checkpointing_needs_less_memory():
    assert parts(Layout("single", 1, 1, activation_checkpointing=True), model(per_sample=1000), 4).activations == 400


def test_an_operation_takes_the_maximum_of_matmul_memory_and_kernel_time():
    on, product = cluster(), Op("aten.mm", 1, 1e12, 0, "bfloat16")
    assert compute_seconds(on, (product,), 1, tf32=True) == pytest.approx(1e12 / (1e14 * 0.5) / 0.7)
    assert compute_seconds(on, (product,), 2, tf32=True) == pytest.approx(2e12 / (1e14 * 0.5) / 0.7)
    moving = Op("aten.add", 1, 0, 8e9, "float32")
    assert compute_seconds(on, (moving,), 1, True) == pytest.approx(0.01 / 0.8)
    # a GPU kernel takes at least 2 microseconds, and the host needs longer to launch one
    small = (Op("aten.add", 1000, 0, 8, "float32"),)
    assert compute_seconds(on, small, 1, True) == pytest.approx(0.002)
    assert launch_seconds(on, small) == pytest.approx(0.03)
    assert launch_seconds(replace(on, device=replace(DEVICE, launch_seconds=4e-6)), small) == pytest.approx(0.004)


def test_operators_reach_different_fractions_of_a_gpu_and_all_of_a_cpu():
    on = cluster()
    processor = replace(on, device=replace(DEVICE, kind="cpu"))
    for name, part in (("aten.convolution", 0.5), ("aten.native_batch_norm", 0.2), ("aten.relu", 0.8)):
        op = Op(name, 1, 0, 8e9, "float32")
        assert op_seconds(on, op, True) == pytest.approx(0.01 / part)
        assert op_seconds(processor, op, True) == pytest.approx(0.01)


def test_fp32_products_use_tf32_only_if_it_is_allowed():
    on = cluster()
    assert matmul_rate(on, "float32", 1e12, tf32=True) == 0.5 * 5e13
    assert matmul_rate(on, "float32", 1e12, tf32=False) == 0.5 * 1e13
    old = replace(on, device=replace(DEVICE, peak_flops={"float16": 1e14, "float32": 1e13}))
    assert matmul_rate(old, "float32", 1e12, tf32=True) == 0.5 * 1e13
    assert matmul_rate(old, "bfloat16", 1e12, tf32=True) == 0.5 * 1e13


def test_measured_flops_are_used_as_they_are_and_interpolated_by_size():
    points = {"bfloat16": ((1e6, 1e12), (1e8, 1e14))}
    on = replace(cluster(), device=replace(DEVICE, measured_flops=points))
    assert matmul_rate(on, "bfloat16", 1e5, True) == 1e12
    assert matmul_rate(on, "bfloat16", 1e7, True) == pytest.approx(1e13)
    assert matmul_rate(on, "bfloat16", 1e9, True) == 1e14


def test_measured_tf32_is_not_used_for_strict_fp32():
    points = {"tf32": ((1e6, 4e13),), "float32": ((1e6, 9e12),)}
    on = replace(cluster(), device=replace(DEVICE, measured_flops=points))
    assert matmul_rate(on, "float32", 1e9, tf32=True) == 4e13
    assert matmul_rate(on, "float32", 1e9, tf32=False) == 9e12


def test_all_devices_of_a_node_send_in_parallel():
    assert ring_bandwidth(cluster(4), 4) == pytest.approx(0.7e11)
    assert ring_bandwidth(cluster(4, nodes=2), 8) == pytest.approx(4 * 0.7e10)
    assert collective_seconds(cluster(4), 4, 0.7e11) == pytest.approx(1, rel=1e-3)
    assert collective_seconds(cluster(4), 1, 1e11) == 0


def test_the_time_of_a_step_matches_a_calculation_by_hand():
    # two samples: 6e12 FLOPs at 0.7 of half of 1e14 FLOP/s, and 1e10 bytes at 0.8 of 0.8 of 1e12 B/s
    each = 6e12 / 5e13 / 0.7 + 1e10 / 8e11 / 0.8
    found = estimate_step_time(
        Layout("single", 1, 1), cluster(), model(), 4, 3, precision="bf16", tf32=True, teacher_seconds=0.25
    )
    assert found.compute == pytest.approx(3 * 2 * each)
    assert found.communication == 0
    assert found.optimizer == pytest.approx((2 + 1 + 4) * GIB / 8e11)
    assert found.teacher == 0.25
    assert found.total == pytest.approx(sum(found.components().values()))


def test_ddp_overlaps_all_buckets_but_the_last_with_the_backward_pass():
    on = cluster(4)
    sent = collective_seconds(on, 4, 2 * GIB * 3 / 4)
    quick = estimate_step_time(Layout("ddp", 4, 1), on, model(), 2, 1, precision="bf16", tf32=True)
    assert quick.communication == pytest.approx(sent * 25 * MIB / GIB)
    slow = replace(on, intra_node_bandwidth=1e9)
    backward = quick.compute * 2 / 3
    sent = collective_seconds(slow, 4, 2 * GIB * 3 / 4)
    assert estimate_step_time(
        Layout("ddp", 4, 1), slow, model(), 2, 1, precision="bf16", tf32=True
    ).communication == pytest.approx(sent - backward)


def test_fsdp_gathers_twice_in_every_micro_batch_and_zero2_once():
    on = replace(cluster(4), intra_node_bandwidth=1e9)
    gathered = {
        name: estimate_step_time(Layout(name, 4, 4), on, model(), 1, 2, precision="bf16", tf32=True).communication
        for name in ("fsdp", "zero2")
    }
    once = 0.5 * GIB * 3 / 4 / 0.7e9 + (len(model().blocks) + 1) * (1e-4 + 3e-5)  # plus host time for every block
    assert gathered["fsdp"] - gathered["zero2"] == pytest.approx(2 * once, rel=1e-4)


def test_measured_times_are_used_only_for_the_measured_device():
    timed = replace(model(), measured_time=MeasuredTime(DEVICE.name, ((2, 0.5), (4, 0.75)), host_seconds=0.1))
    alone = Layout("single", 1, 1)
    assert estimate_step_time(alone, cluster(), timed, 4, 3, precision="bf16", tf32=True).compute == pytest.approx(
        3 * 0.75
    )
    assert estimate_step_time(alone, cluster(), timed, 8, 1, precision="bf16", tf32=True).compute == pytest.approx(1.25)
    other = replace(cluster(), device=replace(DEVICE, name="another"))
    estimated = estimate_step_time(alone, other, timed, 4, 3, precision="bf16", tf32=True)
    assert estimated == estimate_step_time(alone, other, model(), 4, 3, precision="bf16", tf32=True)


def test_the_optimizer_overlaps_with_the_time_a_device_waits_for_the_host():
    alone, by_device = Layout("single", 1, 1), (2 + 1 + 4) * GIB / 8e11
    for host, left in ((0.0, by_device), (0.505, by_device - 0.005), (0.9, 0.0)):
        timed = replace(model(), measured_time=MeasuredTime(DEVICE.name, ((4, 0.5),), host))
        found = estimate_step_time(alone, cluster(), timed, 4, 1, precision="bf16", tf32=True)
        assert (found.compute, found.optimizer) == pytest.approx((max(0.5, host), left))


def test_reasons_agree_with_the_estimated_times():
    found = make_plan(cluster(4), model(), 256)
    fastest = min(each.time.total for each in found.candidates if each.fits)
    others = [each for each in found.candidates if each.fits and each is not found.chosen]
    for each in others:
        assert ("as fast" in each.reason) == (each.time.total <= fastest * 1.03), each.layout.name
    assert found.chosen is not None
    among = "the fastest of" if found.chosen.time.total == fastest else "about the fastest of"
    assert found.chosen.reason.startswith(among)


def test_sharding_a_small_model_is_slower():
    small = replace(model(), trainable={"float32": MIB}, gradients=MIB, optimizer_state=2 * MIB)
    found = named(make_plan(cluster(4), small, 256))
    assert found["fsdp"].time.total > found["ddp"].time.total


def test_a_model_that_fits_on_one_device_uses_ddp():
    found = make_plan(cluster(4), model(), 256)
    assert found.chosen is not None
    assert (found.chosen.layout.name, found.chosen.micro_batch, found.chosen.accumulation) == ("ddp", 64, 1)
    assert found.code == ('model = run.wrap(model, "ddp")', "train = run.shard(dataset, shuffle=True)")
    assert found.command == "samestep run train.py"


def test_of_equally_fast_layouts_the_one_with_fewer_options_is_chosen():
    found = named(make_plan(cluster(4), model(), 256))
    assert found["fsdp"].reason == "as fast (1.00x the chosen time), but needs more options"


def test_the_micro_batch_is_the_largest_that_fits():
    # 94 GiB usable - 4 GiB of state - context = 89.4 samples of 1 GiB; 128 samples in 2 micro-batches of 64
    found = make_plan(cluster(1), model(), 128).chosen
    assert found is not None
    assert (found.layout.name, found.micro_batch, found.accumulation) == ("single", 64, 2)
    assert make_plan(cluster(1), model(), 89).chosen.accumulation == 1
    assert make_plan(cluster(1), model(), 90).chosen.accumulation == 2


def test_a_model_too_large_for_one_device_is_sharded():
    found = make_plan(cluster(4), model(gib=40, per_sample=100 * MIB), 4)
    assert found.chosen.layout.strategy in ("fsdp", "zero2")
    refused = named(found)["ddp"]
    assert not refused.fits
    assert refused.reason == (
        "does not fit: 161.1 GiB needed, 94.0 GiB usable per device with micro-batch 1 (optimizer 80.0 GiB, weights "
        "40.0 GiB)"
    )


def test_activation_checkpointing_is_chosen_only_if_it_is_needed():
    assert make_plan(cluster(1), model(), 8).chosen.layout.name == "single"
    found = make_plan(cluster(1, gib=8), model(per_sample=8 * GIB), 8)
    assert found.chosen.layout.name == "single + activation ckpt"
    assert found.code[0] == 'model = run.wrap(model, activation_checkpointing=(type(model.get_submodule("h.0")),))'


def test_offload_is_the_last_resort_and_needs_host_memory():
    profile = model(gib=100, per_sample=MIB, blocks=100)
    small = cluster(4, gib=60)
    assert make_plan(small, profile, 4).chosen.layout.cpu_offload
    poor = replace(small, host_memory=100 * GIB)
    found = make_plan(poor, profile, 4)
    assert found.chosen is None
    assert named(found)["fsdp + offload"].reason == (
        "does not fit: 400.0 GiB of host memory needed, 90.0 GiB usable per node"
    )


def test_with_a_slow_network_shards_stay_inside_a_node():
    # fsdp gathers 15 GiB over the network for every pass, hybrid sends an eighth of the gradients over it once
    on, profile = cluster(8, nodes=4, inter_node_bandwidth=1e8), model(gib=30)
    hybrid, fsdp = (
        estimate_step_time(layout, on, profile, 4, 4, precision="bf16", tf32=True).communication
        for layout in (Layout("hybrid", 32, 8), Layout("fsdp", 32, 32))
    )
    assert fsdp > 2 * hybrid
    found = make_plan(on, model(gib=30, per_sample=4 * GIB, checkpointed_activations=None), 1024)
    assert found.chosen.layout.name == "hybrid"
    assert found.chosen.layout.shards == 8
    assert found.command == "samestep submit train.py --nodes 4"


def test_hybrid_needs_several_nodes_with_several_devices():
    names = {layout.strategy for layout in layouts(cluster(8), model())}
    assert names == {"single", "ddp", "zero2", "fsdp"}
    assert {layout.strategy for layout in layouts(cluster(1, nodes=8), model())} == names


def test_if_nothing_fits_the_advice_says_what_would():
    found = make_plan(parse_cluster_spec("a10g:1"), model(gib=20, per_sample=100 * MIB), 8)
    assert found.chosen is None
    assert found.command is None
    assert found.code == ()
    assert found.advice[0] == "2 x a10g would fit, with zero2 + offload"
    assert found.advice[1].startswith("1 x h100-nvl (93.0 GiB) would fit, with single")
    assert found.advice[-1] == (
        "single + activation ckpt needs the least memory, 80.6 GiB, most of it optimizer (40.0 GiB): use an optimizer "
        "with less state, or a smaller model"
    )


def test_if_one_larger_gpu_is_not_enough_the_advice_says_how_many_are():
    found = make_plan(parse_cluster_spec("t4:1"), model(gib=120, per_sample=100 * MIB, blocks=4), 8)
    assert found.chosen is None
    assert found.advice[0] == "no number of t4 up to 64 would fit"
    count, name = re.fullmatch(r"(\d+) x (\S+) \(.* GiB\) would fit, with (?:fsdp|zero2).*", found.advice[1]).groups()
    assert int(count) > 1
    there = make_plan(parse_cluster_spec(f"{name}:{count}"), model(gib=120, per_sample=100 * MIB, blocks=4), 8)
    assert there.chosen is not None


def test_if_one_sample_is_too_large_the_advice_is_a_smaller_sample():
    found = make_plan(cluster(1, gib=8), model(gib=0.1, per_sample=1000 * GIB, blocks=0), 8)
    assert found.advice[0] == "no number of plain up to 64 would fit"
    assert found.advice[-1].endswith("use a shorter sequence or a smaller image; a smaller global batch does not help")


def test_frozen_parts_get_their_own_placement_if_no_gradient_flows_through_them():
    small, profile = cluster(2, gib=24), with_teacher(model(gib=0.1, per_sample=10 * MIB), 30, gradient_flows=False)
    found = make_plan(small, profile, 64)
    assert found.chosen.layout.name == "ddp + frozen sharded"
    assert found.code[1] == 'teacher = run.teacher(build, weights=..., placement="sharded")  # for teacher'
    # 0.1 GiB of trainable weights, half of the 30 GiB of frozen ones, and two gathered layers
    assert found.chosen.memory.weights == pytest.approx(0.1 * GIB + 15 * GIB + 2 * GIB, rel=1e-6)


def test_a_full_copy_of_the_frozen_parts_is_chosen_if_it_fits():
    assert (
        make_plan(cluster(2), with_teacher(model(gib=0.1, per_sample=MIB), 30, False), 64).chosen.layout.name == "ddp"
    )


def test_frozen_parts_with_gradient_flow_stay_in_the_model():
    profile = with_teacher(model(gib=0.1, per_sample=10 * MIB), 30, gradient_flows=True)
    found = make_plan(cluster(2, gib=24), profile, 64)
    assert found.chosen is None
    assert named(found)["ddp + frozen sharded"].reason == (
        "gradients flow through the frozen parts, and run.teacher computes no gradients"
    )


@pytest.mark.parametrize(
    ("gpus", "requested", "precision"),
    [
        *(("h100", "auto", "bf16"), ("v100", "auto", "fp32"), ("cpu", "auto", "fp32"), ("mps", "auto", "fp32")),
        *(("h100", "fp32", "fp32"), ("v100", "fp16", "fp16"), ("cpu", "bf16", "bf16")),
    ],
)
def test_precision_auto_resolves_as_in_a_run(gpus, requested, precision):
    assert resolve_precision(parse_cluster_spec(gpus), requested) == precision


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: resolve_precision(parse_cluster_spec("h100"), "fp8"),
            "Unknown precision 'fp8'. Use one of auto, fp32, bf16, fp16.",
        ),
        (
            lambda: resolve_precision(parse_cluster_spec("v100"), "bf16"),
            "precision bf16 is not supported by v100. Use fp16, fp32 or auto.",
        ),
        (
            lambda: resolve_precision(parse_cluster_spec("mps"), "fp16"),
            "precision fp16 is not supported on Apple GPUs. Use fp32 or auto.",
        ),
        (lambda: make_plan(cluster(), model(), 0), "--global-batch must be at least 1, got 0."),
        (
            lambda: make_plan(cluster(), model(), 8, margin=1.0),
            "--margin must be at least 0 and less than 1, got 1.0.",
        ),
    ],
)
def test_invalid_arguments_raise_plan_errors(call, message):
    with pytest.raises(PlanError) as error:
        call()
    assert str(error.value) == message


def test_a_plan_can_be_converted_to_json():
    data = json.loads(json.dumps(make_plan(cluster(2), model(), 8).to_json()))
    assert data["chosen"]["strategy"] == "ddp"
    assert data["chosen"]["memory"]["total"] == sum(
        size for name, size in data["chosen"]["memory"].items() if name not in ("total", "host", "wrap")
    )
    assert data["global_batch"] == 8
    assert len(data["candidates"]) > 5
    assert data["cluster"]["device"]["peak_flops"] == DEVICE.peak_flops
    assert data["model"]["trainable"] == {"float32": GIB}
    assert (data["model"]["gradients"], data["model"]["optimizer_state"]) == (GIB, 2 * GIB)
    assert (data["model"]["activations"], data["model"]["step_flops"]) == ({"fixed": 0, "per_sample": GIB}, 3e12)
    assert data["options"] == {"script": "train.py", "channels_last": False, "blocks": False}


def test_the_memory_bar_has_the_given_width_and_no_empty_segment():
    found = make_plan(cluster(4), model(), 256)
    segments = memory_bar(found, 80)
    assert sum(segment.cells for segment in segments) == 80
    assert [segment.name for segment in segments] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "overhead",
        "free",
        "margin",
    ]
    assert sum(segment.size for segment in segments) == 100 * GIB


def test_memory_of_other_processes_and_the_margin_are_not_free():
    shared = cluster(1)
    shared = replace(shared, device=replace(shared.device, memory_free=70 * GIB))
    found = make_plan(shared, model(), 8)
    size = {segment.name: segment.size for segment in memory_bar(found, 80)}
    assert (size["other processes"], size["margin"]) == (30 * GIB, 6 * GIB)
    assert size["free"] == 64 * GIB - found.chosen.memory.total
    assert sum(size.values()) == 100 * GIB


def test_channels_last_needs_unsharded_weights_and_appears_in_the_code():
    found = make_plan(cluster(4), model(), 256, options=PlanOptions(channels_last=True))
    sharded = [each for each in found.candidates if each.layout.shards > 1]
    assert {each.reason for each in sharded} == {"channels_last=True needs unsharded weights"}
    assert found.code[0] == 'model = run.wrap(model, "ddp", channels_last=True)'
    large = make_plan(cluster(4), model(gib=40), 4, options=PlanOptions(channels_last=True))
    assert large.chosen is None  # only a sharded layout would fit


@pytest.mark.parametrize(
    ("gpus", "nodes", "file", "recipe"),
    [
        ("h100", 1, "python lab/train.py", "samestep recipe run --nproc-per-node 1 saliency"),
        ("h100:4", 1, "samestep run lab/train.py", "samestep recipe run saliency"),
        (
            "h100:4",
            2,
            "samestep submit lab/train.py --nodes 2",
            "samestep recipe copy saliency && samestep submit saliency.py --nodes 2",
        ),
        (
            "cpu:2",
            1,
            "samestep run --nproc-per-node 2 lab/train.py",
            "samestep recipe run --nproc-per-node 2 saliency",
        ),
    ],
)
def test_the_command_starts_the_script_or_the_recipe(gpus, nodes, file, recipe):
    on = parse_cluster_spec(gpus, nodes)
    on = replace(on, device=replace(on.device, memory=80 * GIB, memory_free=80 * GIB))
    large = model(per_sample=30 * MIB)
    spaced = file.replace("lab/train.py", "'my lab/train.py'")
    for script, command in (("lab/train.py", file), ("my lab/train.py", spaced), ("saliency", recipe)):
        assert make_plan(on, large, 256, options=PlanOptions(script)).command == command


def test_named_blocks_appear_in_the_code_of_a_sharded_layout():
    found = make_plan(cluster(4, gib=60), model(gib=16, per_sample=100 * MIB), 64, options=PlanOptions(blocks=True))
    assert found.chosen.layout.shards == 4
    assert 'blocks=(type(model.get_submodule("h.0")),)' in found.code[0]
    assert "blocks" not in make_plan(cluster(4), model(), 256, options=PlanOptions(blocks=True)).code[0]


def test_more_apple_gpus_are_never_advised():
    found = make_plan(parse_cluster_spec("mps"), model(gib=20, per_sample=100 * MIB), 8)
    assert found.chosen is None
    assert not any("mps" in advice for advice in found.advice)


def test_what_if_rows_contain_speed_up_and_gpu_hours():
    plans = [make_plan(cluster(count), model(), 64) for count in (1, 2)]
    first, second = what_if_rows(plans, 6400)
    assert first[:3] == ("1 x plain", "bf16", "single")
    assert first[6] == "1.00"
    assert 1.9 < float(second[6]) <= 2
    assert speed_ups(plans)[1] == pytest.approx(plans[0].chosen.time.total / plans[1].chosen.time.total)
    assert gpu_hours(plans[0], 6400) == pytest.approx(100 * plans[0].chosen.time.total / 3600)
    nothing = make_plan(cluster(1, gib=2), model(), 64)
    assert what_if_rows([nothing], 10) == [("1 x plain", "bf16", "nothing fits", "-", "-", "-", "-", "-")]
    assert speed_ups([nothing, plans[0]]) == [None, 1.0]
    assert plan_rows(nothing)[0][2] == "-"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.01234, "12.3 ms"), (2.5, "2.50 s"), (12.34, "12.3 s"), (1234.5, "1,234 s")]
)
def test_seconds_are_formatted_with_three_digits(seconds, text):
    assert format_seconds(seconds) == text


def test_a_step_is_not_split_if_accumulation_does_not_fit():
    """Measured FLOP/s may be lower for large products, but with accumulation 20 GiB of gradients stay unsharded."""
    slow = {"bfloat16": ((5e11, 1e14), (1e12, 1e13))}
    on = cluster(2, 1, 62)
    on = replace(on, device=replace(on.device, measured_flops=slow))
    profile = model(gib=20, per_sample=0)
    found = make_plan(on, profile, 200)
    for each in found.candidates:
        if each.fits:
            assert each.memory.total <= on.device.memory * 0.94 + 1, each.layout.name


SIZES = st.floats(0.01, 60)
SAMPLES = st.integers(1, 20 * 1024)


@given(SIZES, SAMPLES, st.integers(1, 8), st.integers(1, 4), st.integers(1, 700), st.floats(1, 90))
def test_the_chosen_layout_fits_and_keeps_the_global_batch(gib, mib, devices_per_node, nodes, global_batch, memory_gib):
    on = cluster(devices_per_node, nodes, memory_gib)
    found = make_plan(on, model(gib=gib, per_sample=mib * MIB), global_batch)
    assert [each.fits for each in found.candidates] == sorted((e.fits for e in found.candidates), reverse=True)
    assert all(each.reason for each in found.candidates)
    if found.chosen is None:
        assert found.advice
        return
    chosen = found.chosen
    assert chosen.memory.total <= on.device.memory * 0.94 + 1
    assert chosen.time.total <= 1.03 * min(each.time.total for each in found.candidates if each.fits)
    cuts = [
        Partition(global_batch, global_batch, rank, chosen.layout.ranks, chosen.micro_batch)
        for rank in range(chosen.layout.ranks)
    ]
    batches = [batch for cut in cuts for batch in cut.micro_batches(0)]
    assert sum(batch.real for batch in batches) == global_batch
    assert {batch.rows for batch in batches} == {chosen.micro_batch}
    assert len(batches) == chosen.layout.ranks * chosen.accumulation


@given(SIZES, SAMPLES, st.sampled_from(["ddp", "zero2", "fsdp"]), st.booleans(), st.booleans(), st.integers(1, 32))
def test_more_devices_never_need_more_memory_per_device(gib, mib, strategy, offload, accumulates, micro_batch):
    profile = model(gib=gib, per_sample=mib * MIB, activations=peak(gib, mib * MIB))
    totals = [
        parts(
            Layout(strategy, n, 1 if strategy == "ddp" else n, offload and strategy != "ddp"),
            profile,
            micro_batch,
            accumulates,
        )
        for n in (2, 3, 4, 8, 16)
    ]
    for fewer, more in pairwise(totals):
        assert more.total <= fewer.total + 8  # bytes, from rounding up


@given(SIZES, SAMPLES, st.integers(1, 3), st.integers(1, 500))
def test_a_larger_micro_batch_needs_more_memory(gib, mib, ranks, samples):
    profile = model(gib=gib, activations=peak(gib, mib * MIB))
    layout = Layout("ddp", ranks, 1) if ranks > 1 else Layout("single", 1, 1)
    assert parts(layout, profile, samples).total <= parts(layout, profile, samples + 1).total
