"""A teacher without a placement: the table of all, what is counted and assumed, and the estimate beside the clock."""

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
from samestep.planner.teacher_costs import Placement, TeacherSetup, explain_placement
from samestep.planner.teacher_costs import choose_placement as best_placement
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.placement_choice import choose_placement, needs_of
from samestep.teacher.weight_files import open_weights
from samestep.training.auto_plan import teacher_setup as setting_here
from tests.teachers import LENGTH, WIDTH, WORDS, Speaker, save, speaker, words

CPU = torch.device("cpu")
GIB = 2**30
TEN = ["gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk", "sharded", "served", "cached"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


def frozen(build=Speaker, module=None):
    return FrozenModel(build, open_weights(save(module or speaker(), "one.safetensors")))


def shown_speaker():
    return Speaker(), {"words": words(8)}


def test_the_table_has_every_placement_and_why_in_80_columns(tmp_path, capsys):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"))
        assert teacher.placement == "cpu"
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80  # the last says where it is
    assert lines[0].startswith("teacher: 40.2 KiB for 1 rank(s); seconds of a step of 4 samples, 4 at once:")
    assert lines[1].split("  ")[0].strip() == "placement"
    rows = [line for line in lines[2:] if line.split(" ")[0] in TEN]
    assert sorted(line.split()[0] for line in rows) == sorted(TEN)
    verdict = lines[1].index("reason")
    assert all(line[verdict - 2 : verdict] == "  " and line[verdict] != " " for line in rows)
    assert rows[0][verdict:] == "chosen: fastest placement that fits"
    told = " ".join(lines)
    assert "work: 2 operations a parameter at each of 512 positions of a sample" in told
    assert "free for the tightest rank, half of it left to what trains" in re.sub(r"\s+", " ", told)
    assert len(lines) < 25


def test_the_estimate_is_told_beside_what_calls_take_once(tmp_path, capsys):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"))
        named = run.teacher(Speaker, weights="one.safetensors", placement="gpu")
        for calls in range(6):
            assert ("measured_seconds" in teacher.summary()) == (calls >= 4)
            teacher(words=words(3))
            named(words())
        run.log({"x": 1.0}, now=True)
    told = [line for line in capsys.readouterr().out.splitlines() if "a call with" in line]
    assert len(told) == 1
    assert re.fullmatch(
        r"teacher: a call with 3 sample\(s\) takes \S+ m?s, \S+ times as (long|quick) as the estimate of \S+ m?s",
        told[0],
    )
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())["teacher"]
    assert kept[0].keys() == {"placement", "bytes", "rows", "measured_seconds", "estimated_seconds"}
    assert kept[0]["placement"] == "cpu"
    assert kept[0]["rows"] == 3
    assert min(kept[0]["measured_seconds"], kept[0]["estimated_seconds"]) > 0
    assert kept[1] == {"placement": "gpu", "bytes": named.bytes}


def test_work_is_counted_with_the_example_that_build_returns():
    needs = needs_of(frozen(shown_speaker), TeacherOptions())
    block = WIDTH * (3 + 1 + 8) * WIDTH  # attention's four and the MLP's two matrices
    matrices = 2 * LENGTH * (3 * block + WIDTH * WORDS)
    attention = 3 * 2 * 2 * LENGTH * LENGTH * WIDTH
    assert needs.facts.flops_per_sample == matrices + attention
    assert needs.facts.output_per_sample == LENGTH * WORDS * 4
    assert needs.rows == 8
    assert needs.told == "counted with an example of 8 sample(s)"


def test_examples_may_be_a_tensor_or_what_the_call_takes_in_order():
    with torch.random.fork_rng():
        linear = nn.Linear(3, 5)
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    for example in (half, (half,), [half], {"input": half}):
        needs = needs_of(
            frozen(lambda example=example: (nn.Linear(3, 5), example), linear), TeacherOptions(torch.bfloat16)
        )
        assert (needs.facts.flops_per_sample, needs.facts.output_per_sample, needs.rows) == (30, 10, 2)
        assert (needs.facts.bytes, needs.facts.dtype) == (40, "bfloat16")


def repeat():
    """One layer in two places, as ALBERT has it, and a tied one."""
    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    return nn.Sequential(layer, layer, tied, nn.Linear(4, 3))


def test_a_layer_that_stands_in_two_places_is_as_good_after_its_work_was_counted(tmp_path):
    with torch.random.fork_rng():
        plain = repeat().eval()
    torch.save(plain.state_dict(), "repeat.pt")
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(repeat, weights="repeat.pt", example=torch.ones(2, 4))
        assert torch.equal(teacher(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    there = FrozenModel(repeat, open_weights("repeat.pt"))
    there.example = torch.ones(2, 4)
    assert needs_of(there, TeacherOptions()).facts.flops_per_sample == 2 * (3 * 4 * 4 + 4 * 3)


@pytest.mark.parametrize("build", [shown_speaker, lambda: (*shown_speaker(), lambda model, batch: model(batch))])
def test_a_module_built_with_an_example_teaches_like_any(tmp_path, capsys, build):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(build, weights=save(speaker(), "one.safetensors"), placement="auto")
        assert torch.equal(teacher(words()), speaker()(words()))
    assert "work: counted with an example of 8 sample(s)" in capsys.readouterr().out


@pytest.mark.parametrize("build", [Speaker, shown_speaker])
def test_an_example_that_is_given_counts_before_that_of_build(tmp_path, capsys, build):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        run.teacher(build, weights=save(speaker(), "one.safetensors"), example={"words": words()[:3]})
    assert "work: counted with an example of 3 sample(s)" in capsys.readouterr().out


def test_work_is_assumed_where_there_is_no_example():
    text = needs_of(frozen(), TeacherOptions())
    parameters = sum(tensor.numel() for tensor in {*speaker().parameters()}) + WIDTH  # and a buffer
    assert text.facts.flops_per_sample == 2 * 512 * parameters
    assert text.facts.output_per_sample == 512 * WORDS * 4
    with torch.random.fork_rng():
        image = needs_of(frozen(lambda: nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)), TeacherOptions())
    assert image.facts.flops_per_sample == 2 * (3 * 4 * 9 + 4)
    assert "2 operations a parameter and sample, too few for convolutions" in image.told
    assert text.rows is image.rows is None


def test_what_is_no_layer_stays_on_the_device_while_layers_stream():
    facts = needs_of(frozen(), TeacherOptions()).facts
    layer = sum(p.nbytes for p in speaker().blocks[0].parameters())
    assert facts.largest_layer == layer
    assert facts.resident == facts.bytes - 3 * layer == (WORDS + LENGTH + 1) * WIDTH * 4


@pytest.mark.parametrize("example", [torch.zeros(2, LENGTH + 1, dtype=torch.long), {"text": words()}, None.__class__])
def test_an_example_that_does_not_pass_is_refused(tmp_path, example):
    with (
        Run(global_batch=4, folder=tmp_path / "run") as run,
        pytest.raises(TeacherError, match=r"the example batch does not pass through Speaker by"),
    ):
        run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), example=example)


def choose(run, monkeypatch, words="h100:4", room=80 * GIB, host=500 * GIB, ranks=4, times=1):
    """The choice for GPUs that stand elsewhere, of a teacher as many times as heavy."""
    monkeypatch.setattr("samestep.teacher.placement_choice.device_room", lambda device: room)
    monkeypatch.setattr("samestep.teacher.placement_choice.host_room", lambda: host)
    there = frozen(lambda: Speaker(blocks=24), speaker(blocks=24))
    monkeypatch.setattr(there, "bytes_of", lambda name, wish=None: times * FrozenModel.bytes_of(there, name, wish))
    setting = TeacherSetup(parse_cluster_spec(words), ranks, 64, 64 // ranks)
    return choose_placement(
        Ground(run._comm, CPU, run.folder, run.print, run.once, lambda sharing: setting), there, TeacherOptions()
    )


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, "gpu"),
        ({"times": 250_000}, "sharded"),  # 74 GiB, of which a quarter fits beside what trains
        ({"times": 250_000, "ranks": 1, "words": "h100:1"}, "offload"),
        ({"times": 250_000, "ranks": 1, "words": "h100:1", "host": 20 * GIB}, "disk"),
        ({"times": 250_000, "ranks": 1}, "balanced"),
    ],
)
def test_the_choice_follows_memory_and_seconds(tmp_path, monkeypatch, asked, chosen):
    with Run(global_batch=64, folder=tmp_path / "run") as run:
        found = choose(run, monkeypatch, **asked)
    assert found.placement == chosen
    assert found.setting.used_per_gpu == 40 * GIB
    assert found.seconds(2 * found.setting.micro_batch) >= found.seconds(found.setting.micro_batch) > 0


def test_a_teacher_that_fits_nowhere_is_refused_with_its_table(tmp_path, monkeypatch, capsys):
    with (
        Run(global_batch=64, folder=tmp_path / "run") as run,
        pytest.raises(
            TeacherError, match=r"no placement fits a teacher of .*, as the table says: give a smaller dtype="
        ),
    ):
        choose(run, monkeypatch, times=10**9, host=GIB)
    assert "chosen: " not in (table := capsys.readouterr().out)
    assert "GiB free per" in re.sub(r"\s+", " ", table)


def test_ranks_on_one_processor_share_its_rates():
    alone, four = (setting_here(World(size=n, local_size=n), 64, n) for n in (1, 4))
    assert alone.micro_batch == 4 * four.micro_batch == 64
    assert four.cluster.devices_per_node == four.ranks_per_node == 4
    together = 4 * four.cluster.device.peak_flops["float32"]
    assert together == pytest.approx(four.cluster.cores * parse_cluster_spec("cpu:1").device.peak_flops["float32"])
    assert four.cluster.cores >= alone.cluster.cores >= 1
    half = replace(four, ranks=2, cluster=replace(four.cluster, nodes=1))
    assert half.devices_per_rank == 2


def test_what_is_as_fast_is_so_beside_the_fastest_and_not_beside_the_chosen():
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
