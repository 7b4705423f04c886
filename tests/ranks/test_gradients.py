"""Gradients of a step: those of the mean or sum over the global batch, for any partition."""

import re
import warnings

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.errors import StepError

N = 10
SPREADS = [
    (1, 2),
    (2, 2),
    (3, 1),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, None), (2, None), (4, None)]),
]


def rows():
    """Inputs of ten samples and how many of their four tokens count."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, 3, generator=generator, dtype=torch.float64), torch.arange(N) % 4 + 1


class Weights(nn.Module):
    """Squares of a linear map, one per token."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return ((x @ self.first) * self.second) ** 2


def mean_of_samples(step, losses, mask):
    return step.mean(losses.sum(dim=1))


def mean_of_tokens(step, losses, mask):
    return step.mean(losses, mask)


def mean_of_all_tokens(step, losses, mask):
    return step.mean(losses)


def sum_of_tokens(step, losses, mask):
    return step.sum(losses, mask)


def gradients(reduce, global_batch, micro_batch, strategy=None):
    """For each step of an epoch: the gradient and the loss of this rank."""
    x, counts = rows()
    with Run(global_batch=global_batch) as run:
        model = run.wrap(Weights(), strategy)
        seen = []
        for epoch in run.shard(list(zip(x, counts, strict=True)), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                for inputs, count in step:
                    reduce(step, model(inputs), torch.arange(4) < count[:, None]).backward()
                seen.append((full_gradient(model), run.mean(step.loss) if step.loss is not None else None))
                model.zero_grad()
        return seen


def full_gradient(model):
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat(grads).tolist()


def by_hand(reduce, start, stop):
    """The same on all samples of a step at once, in plain PyTorch."""
    x, counts = (part[start:stop] for part in rows())
    model, mask = Weights(), torch.arange(4) < counts[:, None]
    losses = model(x)
    value = reduce(losses, mask)
    value.backward()
    return full_gradient(model), float(value.detach())


CASES = {
    mean_of_samples: lambda losses, mask: losses.sum(dim=1).mean(),
    mean_of_all_tokens: lambda losses, mask: losses.mean(),
    mean_of_tokens: lambda losses, mask: losses[mask].mean(),
    sum_of_tokens: lambda losses, mask: losses[mask].sum(),
}


@pytest.mark.parametrize("reduce", CASES)
@pytest.mark.parametrize(("size", "micro_batch"), SPREADS)
def test_the_gradient_is_that_of_the_global_batch(ranks, reduce, size, micro_batch):
    expected = [by_hand(CASES[reduce], 0, 7), by_hand(CASES[reduce], 7, 10)]
    for seen in ranks(size, gradients, reduce, 7, micro_batch):
        for (gradient, loss), (expected_gradient, value) in zip(seen, expected, strict=True):
            assert gradient == pytest.approx(expected_gradient, rel=1e-12)
            assert loss is None or loss == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_sharded_gradients_are_those_of_the_global_batch(ranks, micro_batch):
    expected = [by_hand(CASES[mean_of_tokens], 0, 7), by_hand(CASES[mean_of_tokens], 7, 10)]
    for seen in ranks(2, gradients, mean_of_tokens, 7, micro_batch, "fsdp"):
        for (gradient, loss), (expected_gradient, value) in zip(seen, expected, strict=True):
            assert gradient == pytest.approx(expected_gradient, rel=1e-12)
            assert loss == pytest.approx(value, rel=1e-12)


def two_backward_passes(model, step, batch, how):
    """Two losses of one micro-batch, each with its own backward pass."""
    inputs, count = batch
    mask = torch.arange(4) < count[:, None]
    first = model(inputs)
    second = first if how == "through one graph" else model(inputs)
    mean_of_samples(step, first, mask).backward(retain_graph=how == "through one graph")
    mean_of_all_tokens(step, model(inputs) if how == "in turns" else second, mask).backward()


def gradients_of_two_passes(how, micro_batch, strategy, unused="error"):
    x, counts = rows()
    with Run(global_batch=7) as run:
        model = run.wrap(Weights(), strategy, unused_parameters=unused)
        seen = []
        for epoch in run.shard(list(zip(x, counts, strict=True)), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                for batch in step:
                    two_backward_passes(model, step, batch, how)
                seen.append(full_gradient(model))
                model.zero_grad()
        return seen


@pytest.mark.parametrize("how", ["through one graph", "after both forward passes", "in turns"])
@pytest.mark.parametrize(("size", "strategy"), [(1, None), (3, "ddp"), (2, "fsdp")])
def test_a_second_backward_pass_is_averaged_over_the_ranks(ranks, how, size, strategy):
    losses = (CASES[mean_of_samples], CASES[mean_of_all_tokens])
    expected = [
        [a + b for a, b in zip(*(by_hand(loss, *span)[0] for loss in losses), strict=True)]
        for span in ((0, 7), (7, 10))
    ]
    for micro_batch in (None, 2):
        for seen in ranks(size, gradients_of_two_passes, how, micro_batch, strategy):
            for gradient, expected_gradient in zip(seen, expected, strict=True):
                assert gradient == pytest.approx(expected_gradient, rel=1e-12)


def test_a_second_backward_pass_with_unused_parameters_raises(ranks):
    message = "WrapError: step 0.* second backward pass after one forward pass.*add the losses and call backward"
    for error in ranks.errors(2, gradients_of_two_passes, "through one graph", None, "ddp", "allow"):
        assert re.search(message, error), error


def second_pass_on_rank_1(number):
    """Two steps; in step `number` rank 1 alone calls backward twice after one forward pass."""
    x, counts = rows()
    with Run(global_batch=7, start_timeout=150, step_timeout=150) as run:
        model = run.wrap(Weights(), "ddp")
        for epoch in run.shard(list(zip(x, counts, strict=True))).epochs(1):
            for step in epoch:
                for inputs, _ in step:
                    loss = step.mean(model(inputs).sum(dim=1))
                    loss.backward(retain_graph=True)
                    if run.rank == 1 and step.number == number:
                        loss.backward()
                model.zero_grad()


def test_a_second_backward_pass_on_one_rank_in_the_first_step_names_the_rank_and_its_lines(ranks):
    first, second = ranks.errors(2, second_pass_on_rank_1, 0)
    assert "had a second backward pass after one forward pass on rank(s) [1] only: DDP" in first
    line = second_pass_on_rank_1.__code__.co_firstlineno + 9
    where = rf"on rank\(s\) \[1\] only \(backward\(\) at test_gradients.py:{line}, test_gradients.py:{line + 2}\): DDP"
    assert re.search(where, second), second


@pytest.mark.slow
def test_a_second_backward_pass_on_one_rank_in_a_later_step_ends_all_ranks_with_its_cause(ranks):
    first, second = ranks.errors(2, second_pass_on_rank_1, 1)
    message = "had a second backward pass after one forward pass on rank 1, not in the first step (backward() at"
    assert f"WrapError: step 1 {message}" in second
    assert "rank 1" in first


def second_pass_in_the_first_step(passes):
    """Two steps of `passes` loops; in the last loop of step 1 nothing is called twice."""
    x, counts = rows()
    with Run(global_batch=6, start_timeout=150, step_timeout=150, precision="fp64") as run:
        model, seen = run.wrap(Weights(), "ddp"), []
        for epoch in run.shard(list(zip(x, counts, strict=True)), passes=passes).epochs(1):
            for step in epoch:
                for loop in range(passes):
                    for inputs, _ in step:
                        loss = step.mean(model(inputs).sum(dim=1))
                        loss.backward(retain_graph=True)
                        if loop == 0 and (step.number == 0 or passes == 2):
                            loss.backward()
                    seen.append(full_gradient(model))
                    model.zero_grad()
        return seen


def test_a_step_without_the_second_backward_pass_of_the_first_step_raises(ranks):
    for rank, text in enumerate(ranks.errors(2, second_pass_in_the_first_step, 1)):
        assert (
            f"WrapError: step 1 had no second backward pass after one forward pass on rank {rank}, and step 0 had one: "
            "all ranks must average it; add the losses and call backward() once, or call it twice on every rank in "
            "every step"
        ) in text


def test_each_loop_of_a_step_has_its_own_number_of_backward_passes(ranks):
    for seen in ranks(3, second_pass_in_the_first_step, 2):
        for twice, once in zip(seen[::2], seen[1::2], strict=True):
            assert twice == pytest.approx([2 * value for value in once], rel=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_smaller_step_is_scaled_correctly(ranks, size):
    last, expected_gradient = (
        ranks(size, gradients, mean_of_samples, 8, 2)[0][-1],
        by_hand(CASES[mean_of_samples], 8, 10)[0],
    )
    assert last[0] == pytest.approx(expected_gradient, rel=1e-12)
    # the wrong result of dividing each micro-batch mean by the number of accumulation steps, here 8 / 2 = 4
    peers = [value / 4 for value in expected_gradient]
    assert max(abs(a - b) for a, b in zip(last[0], peers, strict=True)) > 0.5


def test_uneven_ranks_give_the_mean_over_samples_not_a_mean_of_means(ranks):
    ours = ranks(2, gradients, mean_of_samples, 7, None)[1][0][0]
    assert ours == pytest.approx(by_hand(CASES[mean_of_samples], 0, 7)[0], rel=1e-12)
    of_each_rank = [by_hand(CASES[mean_of_samples], *span)[0] for span in ((0, 4), (4, 7))]
    mean_of_means = [sum(pair) / 2 for pair in zip(*of_each_rank, strict=True)]
    assert max(abs(a - b) for a, b in zip(ours, mean_of_means, strict=True)) > 0.1


def leave_early(how, strategy, micro_batches_done):
    """Leave the first step early and continue: the gradient of the second step and what the first left."""
    x, counts = rows()
    with Run(global_batch=6) as run:
        model = run.wrap(Weights(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        left = []
        for epoch in run.shard(list(zip(x, counts, strict=True)), micro_batch=1).epochs(1):
            for step in epoch:
                try:
                    for number, (inputs, _) in enumerate(step):
                        losses = model(inputs).sum(dim=1)
                        if step.number == 0 and number == micro_batches_done:
                            if how == "break":
                                break
                            raise KeyError("a sample I do not like")
                        step.mean(losses).backward()
                except KeyError:
                    pass
                left.append([0.0 if p.grad is None else float(p.grad.abs().sum()) for p in model.parameters()])
                if step.number == 0:
                    with pytest.raises(StepError) as error:
                        optimizer.step()
                    continue
                gradient = full_gradient(model)
        return left[0], gradient, str(error.value)


@pytest.mark.parametrize("how", ["break", "raise"])
@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_a_step_left_early_leaves_no_gradients(ranks, how, size, strategy):
    last = 6 // size - 1
    for left, gradient, error in ranks(size, leave_early, how, strategy, last):
        assert left == [0.0, 0.0]
        assert gradient == pytest.approx(by_hand(CASES[mean_of_samples], 6, 10)[0], rel=1e-12)
        assert error.startswith(
            "step 0 was left before its last micro-batch, and then SGD.step() was called: its gradients"
        )
        assert "were dropped; to skip a step, `continue` with the next one" in error


class Small(nn.Module):
    """Its bias has one element, so some ranks of a sharded model hold none of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x))


def not_finite(strategy, bad, overflow):
    """Train two steps, the first with a bad sample: results of step.finite, warnings, whether weights are finite."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        x[bad] = torch.inf if overflow else torch.nan
    with Run(global_batch=4) as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = run.wrap(Small(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answers = []
        for epoch in run.shard(list(x)).epochs(1):
            for step in epoch:
                for inputs in step:
                    losses = model(inputs).squeeze(1).square()
                    step.mean(torch.nan_to_num(losses) if overflow else losses).backward()
                answers.append(step.finite())
                if answers[-1]:
                    optimizer.step()
                optimizer.zero_grad()
        weight = model.state_dict()
        healthy = all(bool(torch.isfinite(getattr(v, "to_local", lambda v=v: v)()).all()) for v in weight.values())
        return answers, [str(w.message) for w in given], healthy


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy"), [(1, None), (2, "ddp"), (2, "fsdp")])
def test_step_finite_agrees_on_every_rank_and_reports_samples(ranks, size, strategy):
    by_rank = ranks(size, not_finite, strategy, 3, False)
    for answers, _, healthy in by_rank:
        assert answers == [False, True]
        assert healthy
    assert by_rank[0][1] == [
        f"step 0 is not finite: the loss is not finite on rank {size - 1}: samples 3; "
        f"the first parameter with such a gradient is 'layer.weight'"
    ]
    assert all(given == [] for _, given, _ in by_rank[1:])


def test_a_non_finite_gradient_of_finite_losses_is_reported(ranks):
    for answers, given, _ in ranks(1, not_finite, None, 3, True):
        assert answers == [False, True]
        assert given[0].startswith(
            "step 0 is not finite: every loss is finite, so the backward pass produced it; the first"
        )


def test_finite_steps_give_no_warning(ranks):
    for answers, given, healthy in ranks(2, not_finite, "fsdp", None, False):
        assert (answers, given, healthy) == ([True, True], [], True)


def one_step(global_batch, micro_batch):
    """A run and its first step; the caller iterates."""
    run = Run(global_batch=global_batch)
    run.start()
    shard = run.shard([torch.ones(3) for _ in range(8)], micro_batch=micro_batch)
    model = run.wrap(nn.Linear(3, 1))
    return run, model, next(iter(next(shard.epochs(1))))


def run_step(step, loss):
    for batch in step:
        loss(batch).backward()


@pytest.fixture
def step_of_four():
    run, model, step = one_step(4, 2)
    yield model, step
    run.close()


def test_a_scalar_loss_or_a_wrong_number_of_losses_raises(step_of_four):
    model, step = step_of_four
    for x in step:
        with pytest.raises(
            StepError, match=r"one loss for each of the 2 rows of this micro-batch, got a scalar: use reduct"
        ):
            step.mean(model(x).mean())
        with pytest.raises(StepError, match=r"2 rows of this micro-batch, got shape \(3,\)"):
            step.sum(torch.ones(3))
        with pytest.raises(StepError, match=r"the mask has shape \(2, 1\) and the losses \(2,\): they must match"):
            step.mean(torch.ones(2), torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("mask", [None, torch.ones(2, dtype=torch.bool)])
def test_losses_in_half_precision_whose_sum_is_too_large_for_it_have_a_mean(step_of_four, mask):
    model, step = step_of_four
    for x in step:
        large = torch.full((2,), 6e4, dtype=torch.float16)
        assert step.mean(large + 0 * model(x)[:, 0].half(), mask).item() == 3e4  # of four samples, two are here
        assert step.sum(large, mask).item() == large.double().sum()
        break


def test_step_mean_outside_of_a_micro_batch_raises(step_of_four):
    _, step = step_of_four
    with pytest.raises(StepError, match="step 0 has no current micro-batch: call this inside `for batch in step:`"):
        step.mean(torch.ones(2))
    for _ in step:
        with pytest.raises(StepError, match="called inside the loop over the micro-batches: call it after the loop"):
            step.finite()


def test_iterating_a_step_twice_raises(step_of_four):
    _, step = step_of_four
    for _ in step:
        with pytest.raises(StepError, match="step 0 was iterated too often: its micro-batches can be read once"):
            next(iter(step))
    with pytest.raises(StepError, match=r"once per optimizer, as in a GAN, pass run.shard\(..., passes=2\)"):
        next(iter(step))


def test_mixing_masked_and_plain_means_over_several_micro_batches_raises(step_of_four):
    model, step = step_of_four
    with pytest.raises(StepError, match="step 0 has 2 micro-batches and mixes a masked mean with other means"):
        run_step(step, lambda x: step.mean(model(x), x[:, :1] > 0) + step.mean(model(x)))
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_a_mask_of_zeros_raises(micro_batch):
    run, model, step = one_step(4, micro_batch)
    with pytest.raises(StepError, match="the masks of step 0 are zero everywhere on all ranks"):
        run_step(step, lambda x: step.mean(model(x), x[:, :1] < 0))
    run.close()


def mask_out_one_rank():
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Linear(3, 1))
        for epoch in run.shard([torch.full((3,), float(i)) for i in range(4)]).epochs(1):
            for step in epoch:
                for x in step:
                    losses = model(x)
                    step.mean(losses, x[:, :1] >= 2).backward()
        return model.module.weight.grad.tolist()


def test_a_rank_whose_mask_is_empty_does_not_count(ranks):
    assert ranks(2, mask_out_one_rank) == [[[2.5, 2.5, 2.5]]] * 2


def nan_losses_of_padding():
    """Set the losses of padding rows to nan and inf: their weight is 0, but zero times nan would be nan."""
    with Run(global_batch=3) as run:
        model = run.wrap(nn.Linear(3, 1))
        for epoch in run.shard([torch.ones(3) for _ in range(3)]).epochs(1):
            for step in epoch:
                for x in step:
                    losses = model(x).squeeze(1)
                    broken = torch.where(step._current.weights == 0, torch.nan, 1.0)
                    step.mean(losses + broken.detach()).backward()
                finite = step.finite()
        return finite, model.module.weight.grad.tolist()


def test_padding_may_be_nan_and_does_not_count(ranks):
    assert ranks(2, nan_losses_of_padding) == [(True, [[1.0, 1.0, 1.0]])] * 2
