"""The recipe distill: the student learns from its teacher, the same on one rank and on two, wherever the teacher is."""

import pytest
from tests.recipes.learnt import PATIENCE, on_one_and_two, same_numbers, train

from recipes import distill
from samestep.errors import DataError

FEW = {"count": 96, "held_out": 21, "length": 12}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_student_of_vectors_comes_near_its_teacher(ranks, tmp_path):
    gap, alone, together = on_one_and_two(ranks, "distill", tmp_path, count=640, held_out=101, length=16)
    assert gap < 1e-6
    same_numbers(alone, together, rel=1e-5)
    assert together["student/correlation"] > together["untrained/correlation"] + 0.1
    assert together["student/cosine"] > 0.7 > together["untrained/cosine"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_student_of_words_comes_near_its_teacher(ranks, tmp_path, smollm2_by_layers):
    options = {"mode": "logits", "teacher": smollm2_by_layers[2], "layers": 1, **FEW}
    gap, alone, together = on_one_and_two(ranks, "distill", tmp_path, **options)
    assert gap < 1e-6
    same_numbers(alone, together, rel=1e-5)
    assert together["student/divergence"] < together["untrained/divergence"] / 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_student_is_the_same_wherever_the_teacher_is(ranks, tmp_path):
    options = {"epochs": 2, "count": 48, "held_out": 9, "length": 12}
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
    options |= {"width": 64, "layers": 1, "gradient_checkpointing": True, "teacher_dtype": "bfloat16"}
    (weights, told), *_ = ranks(2, train, "distill", tmp_path, options, timeout=PATIENCE)
    assert weights["body.model.embed_tokens.weight"].shape[1] == 64
    assert told["student/divergence"] < told["untrained/divergence"]
    assert "student/teacher_perplexity" not in told  # twenty logits do not tell it


def test_a_path_that_is_no_teacher_says_what_is_expected(tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"half lacks a tokenizer \(tokenizer\.json\) and weights \(model\.safetensors"):
        distill.main(out=tmp_path / "out", teacher=tmp_path / "half")
    with pytest.raises(DataError, match=r"no\.txt is no file: expected is a text file with one sentence a line"):
        distill.main(out=tmp_path / "out", texts=tmp_path / "no.txt")
