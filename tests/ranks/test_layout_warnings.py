"""Warnings for values that depend on how samples are divided into batches: padded losses, and means of batches."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from samestep import Run, SamestepWarning

LENGTHS = [2, 9, 3, 4, 7, 2, 5, 8, 3, 6, 1, 4]
TEXTS = [torch.full((length,), length) for length in LENGTHS]


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(one.message) for one in caught if issubclass(one.category, SamestepWarning)]


def pad(texts):
    return pad_sequence(texts, batch_first=True)


def pad_to_9(texts):
    return pad_sequence([*texts, torch.ones(9, dtype=torch.long)], batch_first=True)[:-1]


def train(collate_fn, micro_batch, how):
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Embedding(10, 1))
        shard = run.shard(TEXTS, collate_fn=collate_fn, micro_batch=micro_batch, num_workers=0)
        for epoch in shard.epochs(2):
            for step in epoch:
                for texts in step:
                    losses = model(texts).squeeze(2)
                    if how == "mask":
                        step.mean(losses, mask=texts > 0).backward()
                    elif how == "row":
                        step.mean(losses.mean(dim=1)).backward()
                    elif how == "by epoch":  # as with images that grow
                        step.mean(losses[:, : epoch.number + 2]).backward()
                    elif how == "two terms":
                        (step.mean(losses) + step.mean(losses[:, :4])).backward()
                    else:
                        step.mean(losses).backward()
                model.zero_grad()


@pytest.mark.parametrize(("size", "micro_batch"), [(1, None), (1, 2), (2, None)])
def test_losses_with_another_number_of_columns_and_no_mask_warn_once(ranks, size, micro_batch):
    first, *others = ranks(size, warnings_of, train, pad, micro_batch, "plain")
    rows, columns = (4, (9, 8)) if size == 1 and micro_batch is None else (2, (9, 4 if size == 1 else 7))
    assert first == [
        f"step.mean got losses of shape ({rows}, {columns[1]}) after losses of shape ({rows}, {columns[0]}), without a "
        "mask: if rows are padded to the longest of their micro-batch, how much padding counts depends on the "
        "micro-batches and the number of ranks; pass mask=, which says which values count, as in "
        "`step.mean(losses, mask=labels != -100)`, or lengths= for packed sequences"
    ]
    assert not any(others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collate_fn", "how"),
    [(pad, "mask"), (pad, "row"), (pad_to_9, "plain"), (pad_to_9, "by epoch"), (pad_to_9, "two terms")],
)
def test_losses_with_a_mask_or_the_same_columns_do_not_warn(ranks, collate_fn, how):
    for size, micro_batch in ((1, 2), (2, None)):
        assert ranks(size, warnings_of, train, collate_fn, micro_batch, how) == [[]] * size


ROWS = list(torch.arange(11.0))


class Rows(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def evaluate(how):
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Linear(1, 1))
        test = run.shard(ROWS, micro_batch=1 if how == "batch of one" else None)
        with run.evaluate(model):
            if how in ("mean", "batch of one"):
                return run.mean(x.mean() for x in test)
            if how == "means":
                return run.means({"x": x.mean(), "twice": 2 * x.mean()} for x in test)
            if how == "stream":
                return run.mean(x.mean() for x in run.stream(Rows()))
            if how == "per sample":
                return run.mean(x for x in test)
            if how == "sum and max":
                return run.sum(x.sum() for x in test), run.max(x.max() for x in test)
            if how == "number":  # a time or a count of each batch is one number
                return run.mean(float(len(x)) for x in test)
            batches = [x.mean() for x in test]
        return run.mean(batches[0]), run.mean(torch.tensor(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["mean", "means", "stream"])
def test_the_mean_of_a_batch_in_an_evaluation_warns_once(ranks, how, size):
    first, *others = ranks(size, warnings_of, evaluate, how)
    assert len(first) == 1
    rows = 4 if size == 1 else 2
    assert first[0] == (
        f"run.mean or run.means got a single value for a batch of {rows} rows: every batch then has the same weight, "
        "so the result depends on the batch size and the number of ranks; pass one value per sample, as in "
        "run.mean(cross_entropy(net(x), y, reduction='none') for x, y in test)"
    )
    assert not any(others)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["per sample", "sum and max", "number", "after the loop", "batch of one"])
def test_other_values_in_an_evaluation_do_not_warn(ranks, how):
    for size in (1, 2):
        assert ranks(size, warnings_of, evaluate, how) == [[]] * size
