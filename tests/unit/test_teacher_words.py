"""What run.teacher is told: options that mean nothing are refused with where they belong, top-k works everywhere."""

from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import SamestepError, TeacherError
from samestep.nn import TopK, distill_loss, top_k
from samestep.teacher.options import PLACEMENTS, TeacherOptions, check_weights, check_wish
from samestep.teacher.placement_choice import needs_of
from tests.teachers import LENGTH, WORDS, Speaker, save, speaker, words
from tests.unit.test_teacher_choose import frozen, shown_speaker

ALL = (None, *PLACEMENTS)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


def refusal(placement, **wish):
    with pytest.raises(TeacherError) as caught:
        check_wish(placement, TeacherOptions(**wish))
    return str(caught.value)


@pytest.mark.parametrize("placement", ALL)
@pytest.mark.parametrize(
    ("option", "value", "home", "at"),
    [
        ("servers", 1, "placement='served'", ("served",)),
        ("cache", "outputs", "placement='cached'", ("cached",)),
        ("inner", "rank", "placement='served' ('rank' or 'process') and 'cached'", ("served", "cached")),
    ],
)
def test_an_option_that_means_nothing_there_is_refused_with_where_it_belongs(placement, option, value, home, at):
    if placement in at:
        check_wish(placement, TeacherOptions(**{option: value if placement == at[0] else "cpu"}))
        return
    told = refusal(placement, **{option: value})
    here = "without placement=" if placement is None else f"with placement={placement!r}"
    assert told == f"{option}={value!r} means nothing {here}: it is for {home}; say that, or leave {option}= out"


def test_servers_of_a_cache_are_those_of_its_inside():
    check_wish("cached", TeacherOptions(inner="served", servers=2))
    assert "servers=2 means nothing with placement='cached'" in refusal("cached", inner="cpu", servers=2)


def test_what_serves_is_a_rank_or_a_process():
    assert (
        refusal("served", inner="gpu") == "placement='served' does not know inner='gpu': use one of 'rank', 'process'"
    )


@pytest.mark.parametrize("inner", ["cached", "custom", "process", "moon"])
def test_what_cannot_be_inside_a_cache_is_refused_with_what_can(inner):
    told = refusal("cached", inner=inner)
    assert told.startswith(f"placement='cached' does not know inner={inner!r}: use one of 'gpu', 'cpu', 'balanced', ")
    assert told.endswith("'sharded', 'served'")


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_counts_are_whole_numbers_from_one_on(count):
    told = f"={count!r} is no count: give a whole number from 1 on, or leave it out"
    assert refusal("served", servers=count) == f"servers{told}; a process of its own serves with inner='process'"
    for placement in ALL:
        assert refusal(placement, top_k=count) == f"top_k{told}"


@pytest.mark.parametrize("temperature", ["2", 0, -1.0, float("nan"), float("inf"), None])
def test_a_temperature_is_a_number_above_zero(temperature):
    told = refusal("gpu", temperature=temperature)
    assert told == f"run.teacher got temperature={temperature!r}: give a number above 0, such as 2.0"


def test_numbers_of_other_libraries_are_numbers():
    check_wish("gpu", TeacherOptions(top_k=2, temperature=numpy.float32(2.0)))


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
def test_a_dtype_in_words_gets_the_one_of_torch(typed, right):
    assert refusal("gpu", dtype=typed) == f"dtype={typed!r} is no dtype of torch: say dtype=torch.{right}"


def test_paths_are_text_or_paths(tmp_path):
    check_weights(tmp_path)
    check_weights(None)
    with pytest.raises(TeacherError, match=r"^weights= got a int: give the path of a .safetensors file, a folder of"):
        check_weights(3)
    assert refusal("cached", cache=3) == "cache= got a int: give a folder, such as cache='outputs'"
    assert refusal("gpu", cache=Path("kept")).startswith("cache='kept' means nothing with placement='gpu'")


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"placement": {"": "cpu"}}, "dict"), ({"placement": 3}, "int"), ({"device_map": ["cpu"]}, "list")],
)
def test_placements_are_words_and_device_maps_are_dicts(wrong, kind):
    (name,) = wrong
    told = refusal(wrong.get("placement"), device_map=wrong.get("device_map"))
    assert told.startswith(f"{name}= got a {kind}: placement= is a word, one of auto, gpu, cpu, ")
    assert told.endswith("device_map= is a dict of modules and devices, for placement='custom'")


def test_the_refusals_reach_whoever_calls_run_teacher(tmp_path):
    weights = save(speaker(), "one.safetensors")
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        for wrong, told in (
            ({"weights": 3}, "weights= got a int"),
            (
                {"placment": "cpu"},
                r"run.teacher takes no placment=: did you mean placement=\? beside build ",
            ),
            (
                {"moon": 1},
                "run.teacher takes no moon=: beside build it takes weights, placement, .* cache$",
            ),
            ({"dtype": "bf16"}, "say dtype=torch.bfloat16"),
            ({"placement": "served", "servers": 0}, "servers=0 is no count"),
            ({"placement": "cpu", "servers": 2}, "servers=2 means nothing with placement='cpu'"),
            ({"cache": "kept"}, "cache='kept' means nothing without placement="),
        ):
            with pytest.raises(TeacherError, match=told):
                run.teacher(Speaker, **{"weights": weights, **wrong})


@pytest.mark.parametrize("placement", ALL)
def test_every_placement_gives_the_largest_logits_on_request(tmp_path, placement):
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    inputs, wanted = words(), top_k(speaker()(words()), 3, 2.0)
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        weights = save(speaker(), "one.safetensors")
        teacher = run.teacher(Speaker, weights=weights, placement=placement, top_k=3, temperature=2.0, **options)
        for epoch in run.shard(TensorDataset(inputs), num_workers=0).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    for few in (teacher(batch), teacher.ahead(batch).result()):
                        assert isinstance(few, TopK)
                        assert few.temperature == 2.0
                        assert all(torch.equal(ours, its) for ours, its in zip(few[:3], wanted[:3], strict=True))
                        assert distill_loss(torch.zeros(4, LENGTH, WORDS), few, 2.0).shape == (4, LENGTH)


def test_more_logits_than_there_are_is_told_by_the_call(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="cpu", top_k=99)
        with pytest.raises(SamestepError, match=f"top_k was to keep 99 of {WORDS} classes: give k from 1 to {WORDS}"):
            teacher(words())
        with pytest.raises(SamestepError, match=f"top_k was to keep 99 of {WORDS} classes"):
            run.teacher(shown_speaker, weights="one.safetensors", top_k=99)


def test_the_choice_reckons_with_what_is_given_and_with_what_is_made_on_the_way():
    for build in (Speaker, shown_speaker):
        positions = 512 if build is Speaker else LENGTH
        whole, few = (needs_of(frozen(build), TeacherOptions(top_k=k)).facts for k in (None, 3))
        assert whole.output_per_sample == positions * WORDS * 4
        assert few.output_per_sample == positions * (3 * (4 + 8) + 4)
        assert few.output_per_sample + few.working_per_sample == whole.output_per_sample
        assert whole.working_per_sample == 0


NEAR = {
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


@pytest.mark.parametrize("typed", NEAR)
def test_a_word_that_is_nearly_one_gets_the_right_one(typed):
    right = NEAR[typed]
    told = refusal(typed)
    assert told.startswith(f"placement={typed!r} is no placement: say placement={right}; there are auto, gpu, cpu, ")
    told = refusal(None, device_map=typed)
    assert told.startswith(f"device_map={typed!r} is one word: say placement={right}; device_map= is a dict of ")


def test_a_word_that_is_near_to_none_gets_them_all():
    assert refusal("moon").startswith("placement='moon' is no placement: there are auto, gpu, cpu, balanced")
    told = refusal(None, device_map="moon")
    assert told.startswith("device_map='moon' is one word: placement= is one of auto, gpu, cpu, balanced, ")
    assert told.endswith("; device_map= is a dict of modules and devices, for placement='custom'")


def test_a_temperature_changes_nothing_without_top_k(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        weights = save(speaker(), "one.safetensors")
        one, two = (run.teacher(Speaker, weights=weights, placement="cpu", temperature=t) for t in (1.0, 2.0))
        assert torch.equal(one(words()), two(words()))
