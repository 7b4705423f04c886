"""Numbers of a training step: every sample counts once in run.mean, run.sum and run.max, padding never."""

import pytest
import torch
from torch import nn

from samestep import Run, read_metrics
from tests.ranks.models import Mlp
from tests.ranks.test_logs import count_exchanges

N = 10
LAYOUTS = [(1, 3), (2, None), (2, 2), (3, 1)]


def reduced(micro_batch, where):
    """For each step the mean, sum and maximum of the samples' numbers; the padding rows repeat samples."""
    with Run(global_batch=7) as run:
        seen = []
        for epoch in run.shard(list(range(N)), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                inside, rows = [], []
                for x in step:
                    rows.append(x)
                    largest = run.max(torch.stack([x, -x], dim=1))
                    inside.append((run.sum(x), largest, run.mean(x), run.means([{"x": x[:, None], "y": 2 * x}])))
                if where == "after the loop":
                    seen.append((run.sum(torch.cat(rows)), run.mean(torch.cat(rows).double()), run.mean(step.samples)))
                else:
                    seen += inside
        return seen


@pytest.mark.parametrize(
    ("size", "micro_batch", "batches"),
    [
        (1, 3, [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]]),
        (2, None, [range(7), range(7, N)]),
        (2, 2, [[0, 1, 4, 5], [2, 3, 6], [7, 8, 9]]),
        (3, None, [range(7), range(7, N)]),
    ],
)
def test_padding_rows_do_not_count_inside_the_loop(ranks, size, micro_batch, batches):
    means = [sum(batch) / len(batch) for batch in batches]
    expected = [
        (sum(batch), max(batch), mean, {"x": mean, "y": 2 * mean}) for batch, mean in zip(batches, means, strict=True)
    ]
    for seen in ranks(size, reduced, micro_batch, "inside"):
        assert seen == expected


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


@pytest.mark.slow
def test_a_value_that_has_no_rows_raises_in_a_micro_batch_with_padding(ranks):
    text = ranks.errors(2, mean_of, one_per_batch)[1]
    assert (
        "CommunicationError: this batch has 2 row(s), 1 of them padding, and run.mean, run.sum or run.max got a single "
        "value, which cannot be separated by row: pass one value per sample (reduction='none') instead of one per "
        "batch, inside the loop over the batches" in text
    )


@pytest.mark.slow
def test_the_values_of_each_micro_batch_raise_after_the_loop(ranks):
    text = ranks.errors(2, mean_of, None, True)[1]
    assert "the micro-batches of this step have 2 row(s), 1 of them padding, and run.mean, run.sum or run.max" in text
    assert "got values of shape (1,), which cannot be separated by row" in text


def logged(folder, micro_batch, log):
    """What the steps of one epoch have logged, by step."""
    with Run(global_batch=7, folder=folder) as run:
        model = run.wrap(nn.Linear(1, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        other = torch.optim.SGD(model.parameters(), lr=0.0)
        nn.init.ones_(model.weight if run.size == 1 else model.module.weight)
        nn.init.zeros_(model.bias if run.size == 1 else model.module.bias)
        data = [(torch.tensor([float(i)], dtype=torch.float64), torch.tensor(i)) for i in range(N)]
        for epoch in run.shard(data, micro_batch=micro_batch).epochs(1):
            for step in epoch:
                for x, i in step:
                    log(run, step, model, x, i, optimizer, other)
                if log is not with_two_optimizers:
                    optimizer.step()
                optimizer.zero_grad()
        main = run.is_main
    return list(read_metrics(folder / "metrics.jsonl", by_step=True)) if main else None


def terms(run, step, model, x, i, *_):
    step.log({"loss/kl": x[:, 0] ** 2, "odd": i % 2 == 1})
    step.log({"small": x.float()}, mask=x < 4)
    step.log({"never": x}, mask=x < 0)
    step.mean(model(x)[:, 0]).backward()


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 3), (2, None), (2, 2), (4, 1)])
def test_step_log_writes_means_over_the_samples_of_the_step(ranks, tmp_path, size, micro_batch):
    first, second = ranks(size, logged, tmp_path, micro_batch, terms)[0]
    assert first["loss/kl"] == pytest.approx(sum(i * i for i in range(7)) / 7, rel=1e-15)
    assert second["loss/kl"] == pytest.approx((49 + 64 + 81) / 3, rel=1e-15)
    assert (first["odd"], second["odd"]) == (pytest.approx(3 / 7, rel=1e-15), pytest.approx(2 / 3, rel=1e-15))
    assert first["small"] == 1.5
    assert "small" not in second
    assert "never" not in first


def exchanges_of_a_step(folder, with_log):
    """How many exchanges between ranks the second of two steps has, without its end."""
    with Run(global_batch=4, folder=folder) as run:
        for epoch in run.shard(list(torch.ones(8, 2))).epochs(1):
            for step in epoch:
                calls = count_exchanges(run)
                for x in step:
                    if with_log:
                        step.log({"a": x, "b": x[:, 0]})
                found = len(calls)
        return found


def test_step_log_needs_no_exchange_of_its_own(ranks, tmp_path):
    assert ranks(2, exchanges_of_a_step, tmp_path, True) == ranks(2, exchanges_of_a_step, tmp_path / "no", False)


def two_losses(run, step, model, x, i, *_):
    """A mean and a sum that belong together."""
    (step.mean(model(x)[:, 0]) + step.sum(0.5 * model(x)[:, 0])).backward()


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 3), (2, None)])
def test_the_logged_loss_is_the_sum_of_means_and_sums(ranks, tmp_path, size, micro_batch):
    first, second = ranks(size, logged, tmp_path, micro_batch, two_losses)[0]
    assert first["train/loss"] == pytest.approx(3 + 0.5 * 21, rel=1e-14)
    assert second["train/loss"] == pytest.approx(8 + 0.5 * 24, rel=1e-14)


def with_two_optimizers(run, step, model, x, i, optimizer, other):
    for which, factor in ((optimizer, 1.0), (other, 10.0)):
        step.mean(factor * model(x)[:, 0]).backward()
        which.step()


@pytest.mark.parametrize("size", [1, 2])
def test_each_optimizer_has_its_own_loss(ranks, tmp_path, size):
    first, second = ranks(size, logged, tmp_path, None, with_two_optimizers)[0]
    assert (first["train/loss"], first["train/loss/optimizer1"]) == (pytest.approx(3), pytest.approx(30))
    assert (second["train/loss"], second["train/loss/optimizer1"]) == (pytest.approx(8), pytest.approx(80))


def log_scalar(run, step, model, x, i, *_):
    step.log({"loss/kl": x.mean()})


def log_with_another_mask(run, step, model, x, i, *_):
    step.log({"loss/kl": x}, mask=x[:, 0] > 0)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            log_scalar,
            "StepError: step.log needs one value of 'loss/kl' for each of the 7 rows of this micro-batch, got a "
            "scalar: pass values per row, or log a number that each rank has for itself with run.log",
        ),
        (
            log_with_another_mask,
            "StepError: the mask has shape (7,) and the values of 'loss/kl' (7, 1): they must match",
        ),
    ],
)
def test_what_has_no_rows_cannot_be_logged(ranks, tmp_path, log, message):
    assert message in ranks.errors(1, logged, tmp_path, None, log)[0]


def gradient_norms(folder, strategy):
    with Run(global_batch=4, folder=folder) as run:
        model = run.wrap(Mlp().double(), strategy)
        for epoch in run.shard(list(torch.ones(8, 6, dtype=torch.float64))).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).sum(dim=1)).backward()
                run.log({"gradient_norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0)})
                model.zero_grad()
        main = run.is_main
    return [record["gradient_norm"] for record in read_metrics(folder / "metrics.jsonl", by_step=True)] if main else []


def test_the_gradient_norm_of_a_sharded_model_is_logged(ranks, tmp_path):
    expected = ranks(1, gradient_norms, tmp_path / "one", None)[0]
    assert len(expected) == 2
    assert ranks(2, gradient_norms, tmp_path / "two", "fsdp")[0] == pytest.approx(expected, rel=1e-12)


def packed(micro_batch, value):
    """The gradient and loss of sequences packed one after the other; the tokens of sample i are i, i, ... ."""
    with Run(global_batch=7) as run:
        linear = nn.Linear(1, 1).double()
        nn.init.constant_(linear.weight, 2.0)
        nn.init.constant_(linear.bias, -1.0)
        model = run.wrap(linear)
        data = [torch.full((i % 4 + 1,), float(i), dtype=torch.float64) for i in range(N)]
        shard = run.shard(data, micro_batch=micro_batch, collate_fn=pack)
        seen = []
        for epoch in shard.epochs(1):
            for step in epoch:
                for tokens, lengths in step:
                    value(step, model(tokens[:, None])[:, 0], tokens, lengths).backward()
                weight = next(model.parameters())
                seen.append((weight.grad.item(), run.mean(step.loss), step.finite()))
                model.zero_grad()
        return seen


def pack(samples):
    return torch.cat(samples), torch.tensor([len(sample) for sample in samples])


def mean_of_tokens(step, losses, tokens, lengths):
    return step.mean(losses, lengths=lengths)


def sum_of_tokens(step, losses, tokens, lengths):
    return step.sum(losses, lengths=lengths)


def mean_of_some_tokens(step, losses, tokens, lengths):
    return step.mean(losses, mask=tokens != 3, lengths=lengths)


@pytest.mark.parametrize("value", [mean_of_tokens, sum_of_tokens, mean_of_some_tokens])
@pytest.mark.parametrize(("size", "micro_batch"), [(1, 3), (2, None), (3, 1)])
def test_packed_sequences_have_the_gradient_of_all_tokens(ranks, value, size, micro_batch):
    tokens = [[i for i in samples for _ in range(i % 4 + 1)] for samples in (range(7), range(7, N))]
    if value is mean_of_some_tokens:
        tokens = [[token for token in step if token != 3] for step in tokens]
    counts = [1 if value is sum_of_tokens else len(step) for step in tokens]
    for seen in ranks(size, packed, micro_batch, value):
        for (gradient, loss, finite), step, count in zip(seen, tokens, counts, strict=True):
            assert gradient == pytest.approx(sum(step) / count, rel=1e-12)  # of the weight; the loss is 2 x - 1
            assert loss == pytest.approx((2 * sum(step) - len(step)) / count, rel=1e-12)
            assert finite


def wrong_lengths(step, losses, tokens, lengths):
    return step.mean(losses, lengths=lengths + 1)


def test_lengths_that_do_not_fit_the_losses_raise(ranks):
    (text,) = ranks.errors(1, packed, None, wrong_lengths)
    assert (
        "StepError: lengths has shape (7,) and a sum of 23, and this micro-batch has 7 rows and losses of shape (16,): "
        "pass one length per row, with one loss per token in the order of the rows" in text
    )
