"""Numbers of a training step: every sample counts once in run.mean, run.sum and run.max, padding never."""

import pytest
import torch

from samestep import Run

N = 10
LAYOUTS = [(1, None), (1, 3), (2, None), (2, 2), (3, None), (3, 1), (4, 1)]


def reduced(micro_batch, where):
    """For each step the mean, sum and maximum of the samples' numbers; the padding rows repeat samples."""
    with Run(global_batch=7) as run:
        seen = []
        for epoch in run.shard(list(range(N)), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                inside, rows = [], []
                for x in step:
                    rows.append(x)
                    inside.append((run.sum(x), run.max(torch.stack([x, -x], dim=1)), run.means([{"x": x[:, None]}])))
                if where == "after the loop":
                    seen.append((run.sum(torch.cat(rows)), run.mean(torch.cat(rows).double()), run.mean(step.samples)))
                else:
                    seen.append((sum(part[0] for part in inside), max(part[1] for part in inside)))
        return seen


@pytest.mark.parametrize(("size", "micro_batch"), [*LAYOUTS[:4], (3, None)])
def test_padding_rows_do_not_count_inside_the_loop(ranks, size, micro_batch):
    for seen in ranks(size, reduced, micro_batch, "inside"):
        assert seen == [(sum(range(7)), 6), (7 + 8 + 9, 9)]


@pytest.mark.parametrize(("size", "micro_batch"), LAYOUTS)
def test_padding_rows_do_not_count_after_the_loop(ranks, size, micro_batch):
    for seen in ranks(size, reduced, micro_batch, "after the loop"):
        assert seen == [(21, 3.0, 7.0), (24, 8.0, 3.0)]


def mean_of(select, after=False):
    with Run(global_batch=3) as run:
        (epoch,) = run.shard(list(range(3)), micro_batch=1 if after else None).epochs(1)
        seen = []
        for step in epoch:
            for x in step:
                seen.append(x if after else select(run, step, x))
            if after:
                run.mean(seen)
        return seen


def selected_by_hand(run, step, x):
    return run.mean(x[step.weights > 0])


def test_rows_that_the_script_selects_count(ranks):
    assert ranks(2, mean_of, selected_by_hand) == [[1.0], [1.0]]


def one_per_batch(run, step, x):
    return run.mean(x.float().mean())


def test_a_value_that_has_no_rows_raises_in_a_micro_batch_with_padding(ranks):
    text = ranks.errors(2, mean_of, one_per_batch)[1]
    assert (
        "CommunicationError: this batch has 2 row(s), 1 of them padding, and run.mean, run.sum or run.max got a single "
        "value, which cannot be separated by row: pass one value per sample (reduction='none') instead of one per "
        "batch, inside the loop over the batches" in text
    )


def test_the_values_of_each_micro_batch_raise_after_the_loop(ranks):
    text = ranks.errors(2, mean_of, None, True)[1]
    assert "the micro-batches of this step have 2 row(s), 1 of them padding, and run.mean, run.sum or run.max" in text
    assert "got values of shape (1,), which cannot be separated by row" in text
