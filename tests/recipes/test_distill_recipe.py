"""The recipe distill: the student approaches its teacher, on one rank as on two, for any placement of the teacher.

The values by seed come from `OMP_NUM_THREADS=1 python -m tests.recipes.seed_spread RUN`.
"""

import pytest

from recipes import distill
from samestep.errors import DataError
from tests.recipes.trained import TIMEOUT, assert_same_metrics, small_run, train, train_on_one_and_two


@pytest.mark.slow
def test_a_student_of_sentence_vectors_approaches_its_teacher(ranks, tmp_path):
    difference, one, two = train_on_one_and_two(ranks, small_run("distill_features"), tmp_path)
    assert difference < 1e-6
    assert_same_metrics(one, two, rel=1e-5)
    # seeds 0 to 4: 0.637 0.641 0.662 0.642 0.644, untrained 0.531; the worst minus the spread is 0.612
    assert two["student/correlation"] > two["untrained/correlation"] + 0.05
    # seeds 0 to 4: 0.749 0.749 0.751 0.748 0.749, untrained 0.469
    assert two["student/cosine"] > 0.7 > two["untrained/cosine"]


@pytest.mark.slow
def test_a_student_of_logits_approaches_its_teacher(ranks, tmp_path, models):
    difference, one, two = train_on_one_and_two(ranks, small_run("distill_logits", models), tmp_path)
    assert difference < 1e-6
    assert_same_metrics(one, two, rel=1e-5)
    # seeds 0 to 4: 1.85 1.81 1.85 1.84 1.84, untrained 4.29
    assert two["student/divergence"] < two["untrained/divergence"] / 2


@pytest.mark.slow
def test_the_student_does_not_depend_on_the_placement_of_the_teacher(ranks, tmp_path):
    options = {"epochs": 2, "count": 48, "held_out": 9, "length": 12}
    ((expected, metrics),) = ranks(1, train, "distill", tmp_path / "one", options, timeout=TIMEOUT)
    for placement in ("cpu", "gpu", "cached", "served", "sharded"):
        placed = options | {"teacher_placement": placement}
        (weights, last), *_ = ranks(2, train, "distill", tmp_path / placement, placed, timeout=TIMEOUT)
        assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-6, placement
        assert last["student/correlation"] == pytest.approx(metrics["student/correlation"], abs=1e-5), placement


@pytest.mark.slow
def test_a_narrow_student_learns_from_the_top_k_logits_of_a_served_teacher(ranks, tmp_path, models):
    recipe, options = small_run("distill_top_k", models)
    served = options | {"teacher_placement": "served"}
    (weights, metrics), *_ = ranks(2, train, recipe, tmp_path, served, timeout=TIMEOUT)
    assert weights["body.model.embed_tokens.weight"].shape[1] == 64
    # seeds 0 to 4: 15.98 15.99 15.99 16.01 15.99, untrained 16.11 16.09 16.10 16.11 16.11
    assert metrics["student/divergence"] < metrics["untrained/divergence"]
    assert "student/teacher_perplexity" not in metrics  # twenty logits are not enough for it


def test_invalid_paths_of_a_teacher_and_of_texts_raise(tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"half lacks a tokenizer \(tokenizer\.json\) and weights \(model\.safetensors"):
        distill.main(out=tmp_path / "out", teacher=tmp_path / "half")
    with pytest.raises(DataError, match=r"no\.txt is not a file: pass a text file with one sentence per line"):
        distill.main(out=tmp_path / "out", texts=tmp_path / "no.txt")
