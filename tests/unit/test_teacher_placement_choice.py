"""Choosing a placement: the table, counted and assumed FLOPs, and estimated against measured times."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.environment.world import World
from samestep.errors import TeacherError
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.layouts import Placement
from samestep.planner.teacher_costs import TeacherSetup, explain_placement
from samestep.planner.teacher_costs import choose_placement as best_placement
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from samestep.teacher.options import TeacherOptions
from samestep.teacher.placement_choice import choose_placement, profile_teacher, teacher_setup
from tests.teachers import LENGTH, VOCABULARY, WIDTH, TinyLM, random_tokens, save, tiny_lm

CPU = torch.device("cpu")
GIB = 2**30
ALL_PLACEMENTS = ["gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk", "sharded", "served", "cached"]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


def frozen(build=TinyLM, module=None):
    return FrozenModel(build, open_weights(save(module or tiny_lm(), "one.safetensors")))


def lm_with_example():
    return TinyLM(), {"tokens": random_tokens(8)}


def test_the_table_shows_every_placement_and_its_verdict_in_80_columns(tmp_path, capsys):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"))
        assert teacher.placement == "cpu"
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80  # the last line describes the placement
    assert lines[0].startswith("teacher: 40.2 KiB for 1 rank(s); seconds per step of 4 samples, 4 at once:")
    assert lines[1].split("  ")[0].strip() == "placement"
    rows = [line for line in lines[2:] if line.split(" ")[0] in ALL_PLACEMENTS]
    assert sorted(line.split()[0] for line in rows) == sorted(ALL_PLACEMENTS)
    reason = lines[1].index("reason")
    assert all(line[reason - 2 : reason] == "  " and line[reason] != " " for line in rows)
    assert rows[0][reason:] == "chosen: fastest placement that fits"
    printed = " ".join(lines)
    assert "work: 2 FLOPs per parameter at each of 512 positions of a sample" in printed
    assert "free on the rank with the least, half of it for training" in re.sub(r"\s+", " ", printed)
    assert len(lines) < 25


def test_measured_and_estimated_call_times_are_printed_once(tmp_path, capsys):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"))
        named = run.teacher(TinyLM, weights="one.safetensors", placement="gpu")
        for calls in range(6):
            assert ("measured_seconds" in teacher.summary()) == (calls >= 4)
            teacher(tokens=random_tokens(3))
            named(random_tokens())
        run.log({"x": 1.0}, now=True)
    printed = [line for line in capsys.readouterr().out.splitlines() if "a call with" in line]
    assert len(printed) == 1
    assert re.fullmatch(
        r"teacher: a call with 3 sample\(s\) takes \S+ m?s, \S+ times (slower|faster) than the estimate of \S+ m?s",
        printed[0],
    )
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())["teacher"]
    assert kept[0].keys() == {"placement", "bytes", "rows", "measured_seconds", "estimated_seconds"}
    assert kept[0]["placement"] == "cpu"
    assert kept[0]["rows"] == 3
    assert min(kept[0]["measured_seconds"], kept[0]["estimated_seconds"]) > 0
    assert kept[1] == {"placement": "gpu", "bytes": named.bytes}


def test_flops_are_counted_with_the_example_that_build_returns():
    profiled = profile_teacher(frozen(lm_with_example), TeacherOptions())
    block = WIDTH * (3 + 1 + 8) * WIDTH  # attention's four and the MLP's two matrices
    matrices = 2 * LENGTH * (3 * block + WIDTH * VOCABULARY)
    attention = 3 * 2 * 2 * LENGTH * LENGTH * WIDTH
    assert profiled.profile.flops_per_sample == matrices + attention
    assert profiled.profile.output_per_sample == LENGTH * VOCABULARY * 4
    assert profiled.example_rows == 8
    assert profiled.work_source == "counted with an example of 8 sample(s)"


def test_an_example_can_be_a_tensor_arguments_or_keywords():
    with torch.random.fork_rng():
        linear = nn.Linear(3, 5)
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    for example in (half, (half,), [half], {"input": half}):
        profiled = profile_teacher(
            frozen(lambda example=example: (nn.Linear(3, 5), example), linear), TeacherOptions(torch.bfloat16)
        )
        assert (profiled.profile.flops_per_sample, profiled.profile.output_per_sample, profiled.example_rows) == (
            30,
            10,
            2,
        )
        assert (profiled.profile.bytes, profiled.profile.dtype) == (40, "bfloat16")


def shared_layers():
    """One layer used twice, as in ALBERT, and a tied one."""
    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    return nn.Sequential(layer, layer, tied, nn.Linear(4, 3))


def test_a_layer_used_twice_still_works_after_its_flops_were_counted(tmp_path):
    with torch.random.fork_rng():
        plain = shared_layers().eval()
    torch.save(plain.state_dict(), "shared_layers.pt")
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(shared_layers, weights="shared_layers.pt", example=torch.ones(2, 4))
        assert torch.equal(teacher(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    model = FrozenModel(shared_layers, open_weights("shared_layers.pt"))
    model.example = torch.ones(2, 4)
    assert profile_teacher(model, TeacherOptions()).profile.flops_per_sample == 2 * (3 * 4 * 4 + 4 * 3)


@pytest.mark.parametrize("build", [lm_with_example, lambda: (*lm_with_example(), lambda model, batch: model(batch))])
def test_build_can_return_an_example_and_a_loss(tmp_path, capsys, build):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(build, weights=save(tiny_lm(), "one.safetensors"), placement="auto")
        assert torch.equal(teacher(random_tokens()), tiny_lm()(random_tokens()))
    assert "work: counted with an example of 8 sample(s)" in capsys.readouterr().out


@pytest.mark.parametrize("build", [TinyLM, lm_with_example])
def test_the_example_argument_replaces_that_of_build(tmp_path, capsys, build):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        run.teacher(build, weights=save(tiny_lm(), "one.safetensors"), example={"tokens": random_tokens()[:3]})
    assert "work: counted with an example of 3 sample(s)" in capsys.readouterr().out


def test_flops_are_assumed_without_an_example():
    text = profile_teacher(frozen(), TeacherOptions())
    parameters = sum(tensor.numel() for tensor in {*tiny_lm().parameters()}) + WIDTH  # and a buffer
    assert text.profile.flops_per_sample == 2 * 512 * parameters
    assert text.profile.output_per_sample == 512 * VOCABULARY * 4
    with torch.random.fork_rng():
        image = profile_teacher(frozen(lambda: nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)), TeacherOptions())
    assert image.profile.flops_per_sample == 2 * (3 * 4 * 9 + 4)
    assert "2 FLOPs per parameter and sample, too few for convolutions" in image.work_source
    assert text.example_rows is image.example_rows is None


def test_weights_outside_of_layers_are_resident():
    profile = profile_teacher(frozen(), TeacherOptions()).profile
    layer = sum(p.nbytes for p in tiny_lm().blocks[0].parameters())
    assert profile.largest_layer == layer
    assert profile.resident == profile.bytes - 3 * layer == (VOCABULARY + LENGTH + 1) * WIDTH * 4


@pytest.mark.parametrize(
    "example", [torch.zeros(2, LENGTH + 1, dtype=torch.long), {"text": random_tokens()}, type(None)]
)
def test_an_example_that_does_not_fit_the_module_is_rejected(tmp_path, example):
    with (
        Run(global_batch=4, folder=tmp_path / "run") as run,
        pytest.raises(TeacherError, match=r"the example batch does not pass through TinyLM"),
    ):
        run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), example=example)


def choose(run, monkeypatch, cluster="h100:4", free=80 * GIB, host=500 * GIB, ranks=4, times=1):
    """The choice for the GPUs of another cluster and a teacher `times` as large."""
    monkeypatch.setattr("samestep.teacher.placement_choice.free_device_memory", lambda device: free)
    monkeypatch.setattr("samestep.teacher.placement_choice.free_host_memory", lambda: host)
    model = frozen(lambda: TinyLM(blocks=24), tiny_lm(blocks=24))
    monkeypatch.setattr(model, "bytes_of", lambda name, dtype=None: times * FrozenModel.bytes_of(model, name, dtype))
    setup = TeacherSetup(parse_cluster_spec(cluster), ranks, 64, 64 // ranks)
    monkeypatch.setattr("samestep.teacher.placement_choice.teacher_setup", lambda *_: setup)
    return choose_placement(run._lifecycle.context, model, TeacherOptions())


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "gpu"),
        ({"times": 250_000}, "sharded"),  # 74 GiB, of which a quarter fits next to training
        ({"times": 250_000, "ranks": 1, "cluster": "h100:1"}, "offload"),
        ({"times": 250_000, "ranks": 1, "cluster": "h100:1", "host": 20 * GIB}, "disk"),
        ({"times": 250_000, "ranks": 1}, "balanced"),
    ],
)
def test_the_choice_depends_on_memory_and_time(tmp_path, monkeypatch, options, chosen):
    with Run(global_batch=64, folder=tmp_path / "run") as run:
        found = choose(run, monkeypatch, **options)
    assert found.placement == chosen
    assert found.setup.used_per_gpu == 40 * GIB
    assert found.seconds(2 * found.setup.micro_batch) >= found.seconds(found.setup.micro_batch) > 0


def test_a_teacher_that_fits_no_placement_is_rejected_with_the_table(tmp_path, monkeypatch, capsys):
    with (
        Run(global_batch=64, folder=tmp_path / "run") as run,
        pytest.raises(
            TeacherError, match=r"no placement fits a teacher of .* \(see the table\): pass a smaller dtype="
        ),
    ):
        choose(run, monkeypatch, times=10**9, host=GIB)
    assert "chosen: " not in (table := capsys.readouterr().out)
    assert "GiB free per" in re.sub(r"\s+", " ", table)


def test_ranks_on_one_cpu_share_its_rates():
    alone, four = (teacher_setup(World(size=n, local_size=n), 64, n) for n in (1, 4))
    assert alone.micro_batch == 4 * four.micro_batch == 64
    assert four.cluster.devices_per_node == four.ranks_per_node == 4
    combined = 4 * four.cluster.device.peak_flops["float32"]
    assert combined == pytest.approx(four.cluster.cores * parse_cluster_spec("cpu:1").device.peak_flops["float32"])
    assert four.cluster.cores >= alone.cluster.cores >= 1
    half = replace(four, ranks=2, cluster=replace(four.cluster, nodes=1))
    assert half.devices_per_rank == 2


def test_equally_fast_means_compared_with_the_fastest_not_with_the_chosen():
    setting = TeacherSetup(parse_cluster_spec("h100:1"), 1, 4, 4)
    times = {"gpu": (40, 1.0), "offload": (10, 1.015), "disk": (5, 1.03), "cpu": (1, 3.0)}
    every = [Placement(name, size, 0, seconds, True, "") for name, (size, seconds) in times.items()]
    chosen = best_placement(every, 1.02, setting)
    assert chosen.name == "offload", "as fast as the fastest, with less memory"
    assert [explain_placement(each, chosen, 1.02).reason for each in every] == [
        "as fast as offload, without using less memory",
        "fastest placement that fits",
        "slightly slower than offload",
        "3.0 times as slow as offload",
    ]
