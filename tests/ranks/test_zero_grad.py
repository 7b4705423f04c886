"""zero_grad inside the loop over the micro-batches: an error that names the line, on any strategy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import Run
from tests.ranks.models import Mlp, vectors

MESSAGE = (
    "inside the loop over the micro-batches of step 0, so those of its earlier micro-batches are lost: the step has "
    "{count} micro-batches{why}, whose gradients add up; call zero_grad() after the loop, after optimizer.step()"
)


def train(reset, strategy=None, micro_batch=2, global_batch=8):
    """One step; the weights after it."""
    data = list(zip(*vectors(8, torch.Generator().manual_seed(3)), strict=True))
    with Run(global_batch=global_batch) as run:
        model = run.wrap(Mlp(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard(data, micro_batch=micro_batch).epochs(1):
            for step in epoch:
                for batch in step:
                    reset(model, optimizer, step, batch)
                optimizer.step()
                optimizer.zero_grad()
        return [getattr(p, "full_tensor", p.detach)().detach().tolist() for p in model.parameters()]


def loss_of(model, step, batch):
    return step.mean(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def keep(model, optimizer, step, batch):
    loss_of(model, step, batch).backward()


def before_the_loss(model, optimizer, step, batch):
    optimizer.zero_grad()
    loss_of(model, step, batch).backward()


def before_backward_with_zeros(model, optimizer, step, batch):
    loss = loss_of(model, step, batch)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()


def after_backward(model, optimizer, step, batch):
    loss_of(model, step, batch).backward()
    model.zero_grad()


def after_backward_with_zeros(model, optimizer, step, batch):
    loss_of(model, step, batch).backward()
    model.zero_grad(set_to_none=False)


RESETS = [before_the_loss, before_backward_with_zeros, after_backward, after_backward_with_zeros]


@pytest.mark.parametrize(
    ("reset", "size"), [*((reset, 1) for reset in RESETS), (RESETS[0], 2), (RESETS[3], 2), (RESETS[1], 3)]
)
def test_a_reset_between_micro_batches_raises_and_names_the_line(ranks, reset, size):
    expected = line_of(reset) + " resets the gradients " + MESSAGE.format(count={1: 4, 2: 2, 3: 2}[size], why="")
    for text in ranks.errors(size, train, reset):
        assert f"StepError: {expected}" in text


def line_of(reset):
    first, lines = reset.__code__.co_firstlineno, Path(reset.__code__.co_filename).read_text().splitlines()
    return f"test_zero_grad.py:{next(n for n in range(first, first + 4) if 'zero_grad' in lines[n - 1])}"


def in_the_loop():
    model = nn.Linear(2, 1)
    with Run(global_batch=4) as run:
        model = run.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard(list(torch.ones(4, 2)), micro_batch=2).epochs(1):
            for step in epoch:
                for x in step:
                    optimizer.zero_grad()
                    step.mean(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_the_line_is_the_one_inside_the_loop(ranks):
    first = in_the_loop.__code__.co_firstlineno
    (text,) = ranks.errors(1, in_the_loop)
    assert f"StepError: test_zero_grad.py:{first + 8} resets the gradients inside the loop" in text


def test_the_micro_batch_that_ran_out_of_memory_is_part_of_the_message(monkeypatch, ranks):
    monkeypatch.setenv("SAMESTEP_OOM_RETRIES", "1")
    why = " (samestep has halved the micro-batch, which ran out of memory)"
    for size in (1, 3):
        for text in ranks.errors(size, train, before_the_loss, None, None):
            assert f"StepError: {line_of(before_the_loss)} resets the gradients " in text
            assert MESSAGE.format(count=2, why=why) in text


def first_only(model, optimizer, step, batch):
    """Resets what an earlier step left, before the first backward pass of this one."""
    if step.loss is None:
        optimizer.zero_grad()
    loss_of(model, step, batch).backward()


def scaled(model, optimizer, step, batch):
    loss = loss_of(model, step, batch)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)
    loss.backward()


def in_two_passes(model, optimizer, step, batch):
    loss = loss_of(model, step, batch)
    (0.5 * loss).backward(retain_graph=True)
    (0.5 * loss).backward()


@pytest.mark.parametrize("reset", [first_only, scaled, in_two_passes])
@pytest.mark.parametrize("size", [1, 2])
def test_what_loses_no_gradient_does_not_raise(ranks, reset, size):
    expected = torch.cat([torch.tensor(p).flatten() for p in ranks(1, train, keep, None, None)[0]])
    for weights in ranks(size, train, reset):
        torch.testing.assert_close(torch.cat([torch.tensor(p).flatten() for p in weights]), expected)


@pytest.mark.parametrize(("strategy", "reset"), [("fsdp", RESETS[0]), ("zero2", RESETS[1])])
def test_fsdp_keeps_the_gradients_of_earlier_micro_batches(ranks, strategy, reset):
    expected = torch.cat([torch.tensor(p).flatten() for p in ranks(1, train, keep, None, None)[0]])
    for weights in ranks(2, train, reset, strategy):
        torch.testing.assert_close(torch.cat([torch.tensor(p).flatten() for p in weights]), expected)


@pytest.mark.parametrize(("strategy", "reset"), [("fsdp", RESETS[2]), ("zero2", RESETS[3])])
def test_a_reset_after_the_last_backward_pass_of_fsdp_raises(ranks, strategy, reset):
    for text in ranks.errors(2, train, reset, strategy):
        assert f"StepError: {line_of(reset)} resets the gradients " + MESSAGE.format(count=2, why="") in text


def drop_gradients(model, optimizer, step, batch):
    loss_of(model, step, batch).backward()
    for parameter in model.parameters():
        parameter.grad = None


def test_a_reset_without_zero_grad_raises_too(ranks):
    for text in ranks.errors(2, train, drop_gradients, "fsdp"):
        assert "StepError: the gradients were reset (by zero_grad()?) " + MESSAGE.format(count=2, why="") in text


class Narrow(nn.Module):
    """FSDP cuts dimension 0 into equal chunks: on four ranks the last holds no element of these parameters."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.stem(x))


def train_without_reset(loss_of_rows, strategy, scale=False):
    """One step of two micro-batches per rank; how many elements this rank holds."""
    data = list(torch.arange(32.0).view(16, 2) - 15.5)
    with Run(global_batch=16) as run:
        model = run.wrap(Narrow(), strategy)
        for epoch in run.shard(data, micro_batch=8 // run.size).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(loss_of_rows(model(x), x)).backward()
                    for parameter in model.parameters():
                        if scale and parameter.grad is not None:
                            parameter.grad.mul_(0.5)
        return sum(getattr(p, "to_local", p.detach)().numel() for p in model.parameters())


def squares(y, x):
    return y.square().mean(1)


def no_loss(y, x):
    return 0.0 * y.sum(1)


def of_opposite_ranks(y, x):
    """Rows are contiguous per rank or interleaved: their signs cancel in the bias either way."""
    return y.sum(1) * torch.where(x[:, 0] < 0, -1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_rank_that_holds_no_element_does_not_raise(ranks, strategy):
    held = ranks(4, train_without_reset, squares, strategy)
    assert held[3] == 0 < held[0]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("loss", [no_loss, of_opposite_ranks])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_gradients_that_are_zero_without_a_reset_do_not_raise(ranks, strategy, loss, scale):
    assert all(ranks(2, train_without_reset, loss, strategy, scale))
