"""The options of run.teacher: errors name the right value, and top-k works with every placement."""

from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import SamestepError, TeacherError
from samestep.nn import TopK, distill_loss, top_k
from samestep.teacher.options import PLACEMENTS, TeacherOptions, check_teacher_options
from samestep.teacher.placement_choice import profile_teacher
from tests.teachers import LENGTH, VOCABULARY, TinyLM, random_tokens, save, tiny_lm
from tests.unit.test_teacher_placement_choice import frozen, lm_with_example

ALL_PLACEMENTS = (None, *PLACEMENTS)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


def error_of(placement, **options):
    with pytest.raises(TeacherError) as caught:
        check_teacher_options(placement, TeacherOptions(**options))
    return str(caught.value)


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
@pytest.mark.parametrize(
    ("option", "value", "placements", "valid"),
    [
        ("servers", 1, "placement='served'", ("served",)),
        ("cache", "outputs", "placement='cached'", ("cached",)),
        ("inner", "rank", "placement='served' ('rank' or 'process') and 'cached'", ("served", "cached")),
    ],
)
def test_an_option_without_effect_is_rejected_with_where_it_belongs(placement, option, value, placements, valid):
    if placement in valid:
        check_teacher_options(placement, TeacherOptions(**{option: value if placement == valid[0] else "cpu"}))
        return
    message = error_of(placement, **{option: value})
    here = "without placement=" if placement is None else f"with placement={placement!r}"
    assert message == (
        f"{option}={value!r} has no effect {here}: it belongs to {placements}; use that, or leave out {option}="
    )


def test_servers_of_a_cache_are_those_of_its_inner_placement():
    check_teacher_options("cached", TeacherOptions(inner="served", servers=2))
    assert "servers=2 has no effect with placement='cached'" in error_of("cached", inner="cpu", servers=2)


def test_inner_of_served_is_rank_or_process():
    assert (
        error_of("served", inner="gpu")
        == "placement='served' does not support inner='gpu': use one of 'rank', 'process'"
    )


@pytest.mark.parametrize("inner", ["cached", "custom", "process", "moon"])
def test_an_invalid_inner_placement_of_a_cache_is_rejected_with_the_valid_ones(inner):
    message = error_of("cached", inner=inner)
    assert message.startswith(
        f"placement='cached' does not support inner={inner!r}: use one of 'gpu', 'cpu', 'balanced', "
    )
    assert message.endswith("'sharded', 'served'")


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_counts_are_positive_integers(count):
    message = f"={count!r} is not a positive integer: pass 1 or more, or leave it out"
    assert error_of("served", servers=count) == (
        f"servers{message}; to serve from a separate process pass inner='process'"
    )
    for placement in ALL_PLACEMENTS:
        assert error_of(placement, top_k=count) == f"top_k{message}"


@pytest.mark.parametrize("temperature", ["2", 0, -1.0, float("nan"), float("inf"), None])
def test_a_temperature_is_a_positive_number(temperature):
    message = error_of("gpu", temperature=temperature)
    assert message == f"run.teacher got temperature={temperature!r}: pass a number above 0, for example 2.0"


def test_numpy_numbers_are_accepted():
    check_teacher_options("gpu", TeacherOptions(top_k=2, temperature=numpy.float32(2.0)))


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        ("eight bits", "bfloat16"),
        (16, "bfloat16"),
    ],
)
def test_a_dtype_as_text_is_rejected_with_the_torch_dtype(typed, right):
    assert error_of("gpu", dtype=typed) == f"dtype={typed!r} is not a torch dtype: pass dtype=torch.{right}"


def test_paths_are_strings_or_path_objects(tmp_path):
    check_teacher_options(None, TeacherOptions(), tmp_path)
    check_teacher_options(None, TeacherOptions(), None)
    with pytest.raises(TeacherError, match=r"^weights= got a int: pass the path of a .safetensors file, a folder of"):
        check_teacher_options(None, TeacherOptions(), 3)
    assert error_of("cached", cache=3) == "cache= got a int: pass a folder, for example cache='outputs'"
    assert error_of("gpu", cache=Path("kept")).startswith("cache='kept' has no effect with placement='gpu'")


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"placement": {"": "cpu"}}, "dict"), ({"placement": 3}, "int"), ({"device_map": ["cpu"]}, "list")],
)
def test_placements_are_strings_and_device_maps_are_dicts(wrong, kind):
    (name,) = wrong
    message = error_of(wrong.get("placement"), device_map=wrong.get("device_map"))
    assert message.startswith(f"{name}= got a {kind}: placement= takes one of auto, gpu, cpu, ")
    assert message.endswith("device_map= takes a dict of module names and devices, for placement='custom'")


def test_run_teacher_raises_the_errors_of_its_options(tmp_path):
    weights = save(tiny_lm(), "one.safetensors")
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        for wrong, message in (
            ({"weights": 3}, "weights= got a int"),
            (
                {"placment": "cpu"},
                r"run.teacher\(\) has no parameter placment=: did you mean placement=\? its parameters are build, ",
            ),
            (
                {"moon": 1},
                r"run.teacher\(\) has no parameter moon=: its parameters are build, weights, placement, .* cache$",
            ),
            ({"dtype": "bf16"}, "pass dtype=torch.bfloat16"),
            ({"placement": "served", "servers": 0}, "servers=0 is not a positive integer"),
            ({"placement": "cpu", "servers": 2}, "servers=2 has no effect with placement='cpu'"),
            ({"cache": "kept"}, "cache='kept' has no effect without placement="),
        ):
            with pytest.raises(TeacherError, match=message):
                run.teacher(TinyLM, **{"weights": weights, **wrong})


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_every_placement_returns_the_top_k_logits(tmp_path, placement):
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    inputs, wanted = random_tokens(), top_k(tiny_lm()(random_tokens()), 3, 2.0)
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        weights = save(tiny_lm(), "one.safetensors")
        teacher = run.teacher(TinyLM, weights=weights, placement=placement, top_k=3, temperature=2.0, **options)
        for epoch in run.shard(TensorDataset(inputs), num_workers=0).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    for few in (teacher(batch), teacher.submit(batch).result()):
                        assert isinstance(few, TopK)
                        assert few.temperature == 2.0
                        assert all(torch.equal(ours, theirs) for ours, theirs in zip(few[:3], wanted[:3], strict=True))
                        assert distill_loss(torch.zeros(4, LENGTH, VOCABULARY), few, 2.0).shape == (4, LENGTH)


def test_a_top_k_above_the_vocabulary_is_rejected_by_the_call(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="cpu", top_k=99)
        with pytest.raises(SamestepError, match=f"k=99 for {VOCABULARY} classes: pass k from 1 to {VOCABULARY}"):
            teacher(random_tokens())
        with pytest.raises(SamestepError, match=f"k=99 for {VOCABULARY} classes"):
            run.teacher(lm_with_example, weights="one.safetensors", top_k=99)


def test_the_profile_includes_outputs_and_the_logits_before_top_k():
    for build in (TinyLM, lm_with_example):
        positions = 512 if build is TinyLM else LENGTH
        full, few = (profile_teacher(frozen(build), TeacherOptions(top_k=k)).profile for k in (None, 3))
        assert full.output_per_sample == positions * VOCABULARY * 4
        assert few.output_per_sample == positions * (3 * (4 + 8) + 4)
        assert few.output_per_sample + few.working_per_sample == full.output_per_sample
        assert full.working_per_sample == 0


CLOSE_NAMES = {
    "CPU": "'cpu'",
    "Offload": "'offload'",
    "gpu:0": "'gpu'",
    "cuda:1": "'gpu'",
    "sequentialy": "'sequential'",
    "shard": "'sharded'",
    " disk": "'disk'",
    "disk-offload": "'disk'",
    "Auto": "'auto'",
}


@pytest.mark.parametrize("typed", CLOSE_NAMES)
def test_a_misspelled_placement_is_rejected_with_the_right_one(typed):
    right = CLOSE_NAMES[typed]
    message = error_of(typed)
    assert message.startswith(
        f"placement={typed!r} does not exist: use placement={right}; the placements are auto, gpu, cpu, "
    )
    message = error_of(None, device_map=typed)
    assert message.startswith(f"device_map={typed!r} is a string: use placement={right}; device_map= takes a dict of ")


def test_an_unknown_placement_is_rejected_with_all_of_them():
    assert error_of("moon").startswith("placement='moon' does not exist: the placements are auto, gpu, cpu, balanced")
    message = error_of(None, device_map="moon")
    assert message.startswith("device_map='moon' is a string: placement= is one of auto, gpu, cpu, balanced, ")
    assert message.endswith("; device_map= takes a dict of module names and devices, for placement='custom'")


def test_a_temperature_has_no_effect_without_top_k(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        weights = save(tiny_lm(), "one.safetensors")
        one, two = (run.teacher(TinyLM, weights=weights, placement="cpu", temperature=t) for t in (1.0, 2.0))
        assert torch.equal(one(random_tokens()), two(random_tokens()))
