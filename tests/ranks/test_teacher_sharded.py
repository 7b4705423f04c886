"""A sharded teacher: the outputs of the plain module, 1/N of its bytes, and no hang if ranks differ."""

import pytest
import torch
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.nn import distill_loss
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from tests.ranks.teachers import CLASSES, Student, Teacher, tokens, train_with, write_teacher


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "teacher.safetensors"
    write_teacher(path)
    return path


def outputs(path, dtype):
    """Whether outputs are bit-equal with the plain module, bytes before and after the calls, and the description."""
    with Run(global_batch=4) as run:
        teacher = run.teacher(Teacher, weights=path, placement="sharded", dtype=dtype)
        module, placed = FrozenModel(Teacher, open_weights(path)).load(run.device, dtype), teacher._placed
        before, mine = placed.local_bytes, tokens()[run.rank :: run.size]
        with torch.no_grad():
            same = [torch.equal(teacher(part), module(part)) for part in (mine, mine[:1], mine[:5])]
        grad = teacher(mine).requires_grad
        whole = sum(p.numel() * p.element_size() for p in module.parameters())
        scalars = sum(p.element_size() for p in module.parameters() if p.dim() == 0)
        return same, grad, before, placed.local_bytes, whole, scalars, teacher.describe()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_are_those_of_the_plain_module_and_each_rank_holds_its_part(ranks, weights, size, dtype):
    answers = ranks(size, outputs, weights, dtype)
    for same, grad, before, after, _, _, description in answers:
        assert same == [True, True, True]
        assert not grad
        assert before == after
        assert f"on this rank of {size}, layers gathered when needed" in description
    whole, scalars = answers[0][4:6]
    assert sum(answer[3] for answer in answers) == whole + (size - 1) * scalars
    largest = max(answer[3] for answer in answers)
    assert largest <= whole / size * 1.2, "no rank holds much more than its part"


@pytest.mark.parametrize("size", [1, 2])
def test_a_student_trains_the_same_as_with_a_copy(ranks, weights, size):
    (wanted,) = ranks(1, train_with, weights, {"placement": "gpu"})
    for trained in ranks(size, train_with, weights, {"placement": "sharded"}):
        for name, value in wanted.items():
            torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=0)


def call_more_often(path, extra):
    with Run(global_batch=4, start_timeout=30, step_timeout=30) as run:
        teacher = run.teacher(Teacher, weights=path, placement="sharded")
        teacher(tokens(2))
        if run.is_main:
            teacher(tokens(2))
        if extra:
            run.barrier()


@pytest.mark.parametrize("extra", [False, True])
def test_a_rank_that_calls_more_often_is_named_and_does_not_hang(ranks, weights, extra):
    first, second = ranks.errors(2, call_more_often, weights, extra)
    assert "rank 0 called teacher(...) at test_teacher_sharded.py" in first or "rank 0 waits in teacher(...)" in first
    other = "run.barrier" if extra else "Run.close"
    assert other in first
    assert "every rank must make the same calls in the same order" in first
    assert "teacher(...)" in second


class Gathered(Student):
    """A student for FSDP, which warns about outputs that are views."""

    def forward(self, tokens):
        return super().forward(tokens).clone()


def call_on_one_rank_only(path, strategy):
    with Run(global_batch=4, start_timeout=5, step_timeout=5) as run:
        teacher = run.teacher(Teacher, weights=path, placement="sharded")
        model = run.wrap(Gathered(), strategy=strategy)
        for epoch in run.shard(TensorDataset(tokens())).epochs(1):
            for step in epoch:
                for (batch,) in step:
                    target = teacher(batch) if run.is_main else torch.zeros(len(batch), 6, CLASSES)
                    step.mean(distill_loss(model(batch), target)).backward()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_call_on_one_rank_only_is_reported_on_all(ranks, weights, strategy):
    first, second = ranks.errors(2, call_on_one_rank_only, weights, strategy)
    assert "RankMissing: rank 0 waits in teacher(...) at test_teacher_sharded.py" in first
    last = "rank 1 was last in the comparison of the data between ranks at test_teacher_sharded.py"
    assert last in first or "rank 1 failed: " in first
    assert {"ddp": "seen from rank 1: rank 0 ", "fsdp": "RankMissing: rank 1 "}[strategy] in second
    assert "waits in teacher(...) at test_teacher_sharded.py" in second


def evaluate(path, placement):
    with Run(global_batch=8, start_timeout=30, step_timeout=30) as run:
        teacher = run.teacher(Teacher, weights=path, placement=placement)
        model, test = run.wrap(Student()), run.shard(TensorDataset(tokens()), micro_batch=1)
        with run.evaluate(model) as net:
            return run.mean(distill_loss(net(x), teacher(x)).mean(1) for (x,) in test)


def test_an_evaluation_of_uneven_parts_makes_the_same_number_of_calls(ranks, weights):
    (wanted,) = ranks(1, evaluate, weights, "gpu")
    for found in ranks(3, evaluate, weights, "sharded"):
        assert found == pytest.approx(wanted, abs=1e-6)
