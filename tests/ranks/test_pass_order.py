"""Passes of a sharded model that ranks make or leave out: those of one rank are an error, those of all are not."""

import inspect
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.parallel import gradient_checks

STEPS = 6
LATER = 2  # a step that differs, after some that do not


def train(differs, number, by_all=False):
    """Train in steps of two micro-batches; in step `number` rank 1 differs, or all ranks do."""
    torch.manual_seed(0)
    with Run(global_batch=4, start_timeout=150, step_timeout=150) as run:
        model = run.wrap(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard(list(torch.rand(4 * STEPS, 2)), micro_batch=1).epochs(1):
            for step in epoch:
                case = differs if (by_all or run.rank == 1) and step.number in (number, number + 2) else ""
                if case == "skip":
                    continue
                for x in step:
                    loss = step.mean(model(x).flatten())
                    if case == "leave out":
                        continue
                    loss.backward(retain_graph=True)
                    if case == "break":
                        break
                    if case == "repeat":
                        loss.backward()
                if case != "break":
                    optimizer.step()
                optimizer.zero_grad()
        return [float(p.detach().full_tensor().sum()) for p in model.parameters()]


def line(text):
    """The line of `train` with this text."""
    source, first = inspect.getsourcelines(train)
    return first + next(index for index, each in enumerate(source) if text in each)


AGAIN = line("loss.backward()")


def test_a_pass_that_differs_on_one_rank_in_the_first_step_is_an_error_on_every_rank(ranks):
    first, second = ranks.errors(2, train, "repeat", 0)
    where = f"rank 1 runs a backward pass at test_pass_order.py:{AGAIN}"
    assert f"WrapError: step 0: {where} after forward and backward, and rank 0 ends the micro-batch at" in second
    assert re.search(f"WrapError: step 0: rank 0 ends the micro-batch at .* after forward and backward, and {where}",
                     first), first  # fmt: skip


def count_comparisons(differs):
    """How often a rank compares its passes, and the weights, if all ranks differ in the same steps."""
    calls, find_differences = [], gradient_checks.find_differences

    def count(*args):
        calls.append(args[3])
        return find_differences(*args)

    gradient_checks.find_differences = count
    try:
        weights = train(differs, LATER, by_all=True)
    finally:
        gradient_checks.find_differences = find_differences
    return calls, weights


@pytest.mark.parametrize(
    ("differs", "positions"),
    [
        ("", ["0/0", "0/1", "0/2"]),  # forward, backward and the end of the first micro-batch; later ones are equal
        ("leave out", ["0/0", "0/1", "0/2", "4/1"]),
        ("repeat", ["0/0", "0/1", "0/2", "4/2", "4/3"]),
        ("break", ["0/0", "0/1", "0/2", "4/2"]),
        ("skip", ["0/0", "0/1", "0/2", "4/0"]),
    ],
)
def test_ranks_compare_passes_only_when_they_make_them_for_the_first_time(ranks, differs, positions):
    (first, weights), second = ranks(2, count_comparisons, differs)
    assert first == positions
    assert second == (positions, weights)


def report_at_every_line():
    """The micro-batches in the reports that another thread could make before each line of PassOrder."""
    comm = SimpleNamespace(board=SimpleNamespace(reports={}), world=SimpleNamespace(rank=0))
    order = gradient_checks.PassOrder(nn.Linear(1, 1), comm)
    order._known = {0: {"F": {"B": {gradient_checks._END: {"": {}}}}}}
    made = []

    def report(frame, *_):
        if frame.f_code.co_filename == gradient_checks.__file__ and frame.f_code.co_name != "_report":
            made.append(order._report())
        return report

    before = sys.gettrace()
    sys.settrace(report)
    try:
        for _ in range(3):
            order.start([0], 0, 0)
            order._add("F")
            order._add("B")
    finally:
        sys.settrace(before)
    return [dict(json.loads(text)[0]) for text in made]


def test_a_report_that_another_thread_makes_never_has_the_passes_of_another_micro_batch(ranks):
    (reports,) = ranks(1, report_at_every_line)
    for number in range(3):
        seen = [report[number] for report in reports if number in report]
        assert seen == sorted(seen, key=len)  # they only grow
        assert (seen[0], seen[-1][:2]) == ("", "FB")
