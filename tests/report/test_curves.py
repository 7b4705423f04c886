"""Curves: the last value of a step counts, a peak survives thinning, and differences are exact."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ReportError
from samestep.report.curves import Curve, Curves, compare, read_curves, thin_out
from tests.report.run_folders import losses, write_lines

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def curve(values, steps=None):
    values = np.asarray(values, dtype=float)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    return Curve(steps, values, steps.astype(float))


def test_of_a_step_that_was_logged_again_the_last_value_counts(tmp_path):
    again = losses(range(3, 6), of=lambda step: 9.0)
    write_lines(tmp_path / "metrics.jsonl", [*losses(range(5)), *again])
    curves = read_curves(tmp_path / "metrics.jsonl")
    found = curves.by_name["train/loss"]
    assert found.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.values.tolist() == [1.0, 1 / 2, 1 / 3, 9.0, 9.0, 9.0]
    assert curves.epochs == 1


def test_no_metrics_are_no_curves_and_another_file_is_an_error(tmp_path):
    assert read_curves(tmp_path / "metrics.jsonl") == Curves({}, 0, [])
    (tmp_path / "metrics.jsonl").write_text("step,loss\n1,2\n")
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 1 is not a record like"):
        read_curves(tmp_path / "metrics.jsonl")


def test_lines_that_are_no_records_are_skipped_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, losses(range(3)))
    with path.open("ab") as file:
        file.write(b"\xff\xfe garbage\n[1, 2]\n\0\0\0\n")
        file.write(b'{"step": "x", "time": 1, "train/loss": 1}\n{"step": 1e999, "train/loss": 1}\n')
        file.write(b'{"step": 4, "train/loss": "high", "note": {"a": 1}, "huge": 1' + b"0" * 400 + b"}\n")
        file.write(b'{"step": 5, "train/loss": 0.5}\n{"step": 6, "tra')
    curves = read_curves(path)
    assert curves.by_name.keys() == {"train/loss"}
    assert curves.by_name["train/loss"].steps.tolist() == [0, 1, 2, 5]
    assert curves.skipped == [4, 5]


def test_nan_and_infinity_are_values(tmp_path):
    records = [
        {"step": 0, "time": 0.0, "loss": None},
        {"step": 1, "time": 0.0, "loss": None, "infinite": {"loss": -1}},
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    (first, second) = read_curves(tmp_path / "metrics.jsonl").by_name["loss"].values.tolist()
    assert math.isnan(first)
    assert second == -math.inf


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(8, 60))
def test_thinning_keeps_the_ends_every_extreme_and_some_of_what_is_not_finite(values, most):
    whole, thin = curve(values), thin_out(curve(values), most)
    kept = thin.points
    assert set(zip(kept.steps.tolist(), map(repr, kept.values.tolist()), strict=True)) <= set(
        zip(whole.steps.tolist(), map(repr, whole.values.tolist()), strict=True)
    )
    assert (kept.steps[0], kept.steps[-1]) == (0, len(values) - 1)
    assert (np.diff(kept.steps) > 0).all()
    finite = whole.values[np.isfinite(whole.values)]
    if len(finite):
        shown = kept.values[np.isfinite(kept.values)]
        assert (shown.min(), shown.max()) == (finite.min(), finite.max())
    assert np.isfinite(whole.values).all() == np.isfinite(kept.values).all()
    assert len(kept) <= max(most, 2 * 5) * 5 / 4 + 5


def test_means_of_buckets_weigh_what_they_stand_for():
    thin = thin_out(curve(range(1000)), 40)
    assert thin.means is not None
    assert thin.weights.sum() == 1000
    assert float((thin.means.values * thin.weights).sum()) == pytest.approx(sum(range(1000)))
    assert thin_out(curve(range(40)), 40).means is None


def test_differences_are_those_of_common_steps():
    found = compare(curve([1.0, 2.0, 3.0]), curve([2.0, 3.5, 8.0], steps=[1, 2, 3]))
    assert found.steps.tolist() == [1, 2]
    assert found.values.tolist() == [0.0, 0.5]
    assert (found.largest, found.step) == (0.5, 2)
    assert found.relative == pytest.approx(0.5 / 3.5)
    assert (found.relative_step, found.pair) == (2, (3.0, 3.5))
    assert compare(curve([1.0]), curve([1.0], steps=[5])) is None


def test_the_largest_relative_difference_may_be_at_another_step_than_the_largest_one():
    found = compare(curve([1000.0, 0.001, 1.0]), curve([1001.0, 0.002, 1.0]))
    assert (found.largest, found.step) == (1.0, 0)
    assert (found.relative, found.relative_step, found.pair) == (0.5, 1, (0.001, 0.002))


def test_nan_equals_nan_and_differs_from_any_number():
    nan, inf = math.nan, math.inf
    same = compare(curve([nan, inf, -inf]), curve([nan, inf, -inf]))
    assert (same.largest, same.relative) == (0.0, 0.0)
    other = compare(curve([0.0, nan]), curve([0.0, 1.0]))
    assert (other.largest, other.step) == (math.inf, 1)
    assert compare(curve([inf]), curve([-inf])).largest == math.inf


def test_a_million_points_stay_a_few_thousand(tmp_path):
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[654_321] = 50.0
    thin = thin_out(curve(values), 4000)
    assert len(thin.points) <= 4100
    assert thin.points.steps[thin.points.values.argmax()] == 654_321
    json.dumps(thin.points.values.tolist(), allow_nan=False)
