"""The recipe distill: the student learns from its teacher, the same on one rank and on two, wherever the teacher is."""

import pytest
import torch
from safetensors import safe_open

from recipes import distill
from samestep.assets import minilm
from samestep.errors import DataError
from tests.recipes.learnt import PATIENCE, on_one_and_two, train

CLOCK = {"time", "train/samples_per_s", "student/speedup", "untrained/speedup"}
FEW = {"count": 96, "held_out": 21, "length": 12}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_student_of_vectors_comes_near_its_teacher(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "distill", tmp_path, count=640, held_out=101, length=16)
    assert gap < 1e-6
    assert_alike(alone, together)
    assert together["student/correlation"] > together["untrained/correlation"] + 0.1
    assert together["student/cosine"] > 0.7 > together["untrained/cosine"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_student_of_words_comes_near_its_teacher(ranks, tmp_path, smollm2_by_layers):
    options = {"mode": "logits", "teacher": smollm2_by_layers[2], "layers": 1, **FEW}
    gap, alone, together = on_one_and_two(ranks, "distill", tmp_path, **options)
    assert gap < 1e-6
    assert_alike(alone, together)
    assert together["student/divergence"] < together["untrained/divergence"] / 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_student_is_the_same_wherever_the_teacher_is(ranks, tmp_path):
    options = {"epochs": 2, **FEW}
    ((wanted, told),) = ranks(1, train, "distill", tmp_path / "alone", options, timeout=PATIENCE)
    for placement in ("cpu", "gpu", "cached", "served", "sharded"):
        placed = options | {"teacher_placement": placement}
        (weights, last), *_ = ranks(2, train, "distill", tmp_path / placement, placed, timeout=PATIENCE)
        assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < 1e-6, placement
        assert last["student/correlation"] == pytest.approx(told["student/correlation"], abs=1e-5), placement


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_top_k_logits_of_a_served_teacher_teach_a_narrow_student(ranks, tmp_path, smollm2_by_layers):
    options = {"mode": "logits", "teacher": smollm2_by_layers[1], "teacher_placement": "served", "top_k": 20, **FEW}
    options |= {"width": 64, "layers": 1, "gradient_checkpointing": True}
    (weights, told), *_ = ranks(2, train, "distill", tmp_path, options, timeout=PATIENCE)
    assert weights["body.model.embed_tokens.weight"].shape[1] == 64
    assert told["student/divergence"] < told["untrained/divergence"]
    assert "student/teacher_perplexity" not in told  # twenty logits do not tell it


def narrow_student() -> tuple[bool, tuple[int, ...]]:
    """Whether all of a narrow student trains, and the shape of what it gives for three sentences."""
    student = distill.Student(minilm(), False, width=64, layers=1)
    tokens = torch.randint(1000, (3, 5), generator=torch.Generator().manual_seed(0))
    whole = all(parameter.requires_grad for parameter in student.parameters())
    return whole, tuple(student(tokens, torch.ones_like(tokens)).shape)


def test_a_narrow_student_is_widened_and_begins_from_nothing(ranks):
    assert ranks(1, narrow_student) == [(True, (3, 384))]


def test_a_wide_student_begins_with_layers_of_its_teacher():
    student = distill.Student(minilm(), False, width=None, layers=2)
    with safe_open(minilm() / "model.safetensors", "pt") as weights:
        for mine, theirs in ((0, 0), (1, 5)):
            key = "encoder.layer.{}.attention.self.query.weight"
            assert torch.equal(student.body.get_parameter(key.format(mine)), weights.get_tensor(key.format(theirs)))


def test_a_missing_file_of_texts_says_what_is_expected(tmp_path):
    with pytest.raises(
        DataError, match=r"no\.txt does not exist: --texts expects a text file with one sentence a line"
    ):
        distill.read(tmp_path / "no.txt", tmp_path, 10, 12)


def test_texts_of_a_file_are_read_line_by_line(tmp_path):
    (tmp_path / "two.txt").write_text("to be\n\nor not to be\n")
    tokens, mask, numbers = distill.read(tmp_path / "two.txt", minilm(), 10, 8).tensors
    assert mask.sum(1).tolist() == [4, 6]  # with a word before and one behind
    assert tokens.shape == (2, 8)
    assert numbers.tolist() == [0, 1]


def assert_alike(alone: dict[str, float], together: dict[str, float]) -> None:
    """Hold everything logged on two ranks against one, but for the clock."""
    assert alone.keys() - CLOCK == together.keys() - CLOCK
    for name in alone.keys() - CLOCK:
        assert together[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), name
