"""BatchNorm on several ranks: averaged or synchronized statistics, and padding rows that stay out of them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from samestep import Run
from samestep.parallel.batchnorm import CpuSyncBatchNorm, sync_batchnorm
from tests.ranks.expected import ignore_batchnorm_warning

GENERATOR = torch.Generator().manual_seed(4)
IMAGES = list(torch.randn(20, 2, 3, 3, generator=GENERATOR))
ROWS = list(torch.randn(20, 2, generator=GENERATOR))
PER_RANK = (
    "1 BatchNorm layer(s), 'norm' first, see only the rows of their own rank, so results depend on the number of "
    "ranks: pass run.wrap(model, sync_batchnorm=True) or use GroupNorm; samestep averages the running statistics "
    "over the ranks before evaluation and checkpoints"
)


class Normed(nn.Module):
    """One norm, frozen or not, and a head."""

    def __init__(self, norm, frozen=False):
        super().__init__()
        self.norm = norm
        self.norm.requires_grad_(not frozen)
        self.head = nn.Linear(2, 1)
        self.rows = []

    def forward(self, x):
        self.rows.append(len(x))
        y = self.norm(x)
        return self.head(y.mean(dim=(2, 3)) if y.dim() == 4 else y)


def train(make, data, global_batch, micro_batch=None, frozen=False, sync=False):
    """One epoch: rows of every forward pass, the running mean before and after evaluation, and the warnings given."""
    with Run(global_batch=global_batch) as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = run.wrap(Normed(make(), frozen), sync_batchnorm=sync)
        inner = getattr(model, "module", model)
        for epoch in run.shard(data, micro_batch=micro_batch).epochs(1):
            model.train()
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
        before, rows = inner.norm.running_mean.clone(), list(inner.rows)
        with run.evaluate(model):
            after = inner.norm.running_mean.clone(), inner.norm.running_var.clone()
        return rows, before, after, [str(w.message) for w in given]


def train_on_stream(global_batch):
    """The rows of every forward pass over a stream."""
    with Run(global_batch=global_batch) as run:
        with ignore_batchnorm_warning():
            model = run.wrap(Normed(images()))
        for epoch in run.stream(Images()).epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
        return model.module.rows


class Images(IterableDataset):
    """The first twelve images in a stream."""

    def __iter__(self):
        return iter(IMAGES[:12])


def images():
    return nn.BatchNorm2d(2)


def vectors():
    return nn.BatchNorm1d(2)


def running_mean(*batches):
    """The running mean of BatchNorm after these batches, computed by hand."""
    kept = torch.zeros(2)
    for batch in batches:
        kept = 0.9 * kept + 0.1 * torch.stack(batch).mean(dim=(0, 2, 3))
    return kept


def test_padding_does_not_enter_the_statistics_if_the_rank_has_a_sample(ranks):
    first, second = ranks(2, train, images, IMAGES[:12], 7)
    assert first[0] == [4, 3]  # steps of 7 and 5: four and three samples here, three and two there, no padding
    assert second[0] == [3, 2]
    assert torch.allclose(first[1], running_mean(IMAGES[:4], IMAGES[7:10]))
    assert torch.allclose(second[1], running_mean(IMAGES[4:7], IMAGES[10:12]))
    assert first[3] == [PER_RANK]
    assert second[3] == []


def test_padding_does_not_enter_the_statistics_of_a_stream(ranks):
    assert ranks(2, train_on_stream, 7) == [[4, 3], [3, 2]]


def test_running_statistics_are_averaged_over_the_ranks_for_evaluation(ranks):
    first, second = ranks(2, train, images, IMAGES[:12], 7)
    assert not torch.allclose(first[1], second[1])
    for after in (first[2], second[2]):
        assert torch.allclose(after[0], (first[1] + second[1]) / 2)
    assert torch.equal(first[2][1], second[2][1])


def train_on_images(run, model, after_step=lambda: None):
    """One epoch in which ranks see different rows."""
    for epoch in run.shard(IMAGES[:12]).epochs(1):
        for step in epoch:
            for x in step:
                step.mean(model(x).squeeze(1)).backward()
            after_step()


def evaluate_in_eval_mode():
    """The running mean of this rank in an evaluation after the user called model.eval()."""
    with Run(global_batch=7) as run, ignore_batchnorm_warning():
        inner = Normed(images())
        model = run.wrap(inner)
        train_on_images(run, model)
        before = inner.norm.running_mean.clone()
        model.eval()
        with run.evaluate(model):
            return before, inner.norm.running_mean.clone()


def evaluate_on_rank_0_only():
    with Run(global_batch=7, start_timeout=120) as run, ignore_batchnorm_warning():
        model = run.wrap(Normed(images()))
        if run.is_main:
            with run.evaluate(model):
                pass
        run.barrier()


def test_an_evaluation_on_one_rank_only_raises_and_matches_no_other_collective(ranks):
    for text in ranks.errors(2, evaluate_on_rank_0_only):
        assert "CommunicationError: rank " in text
        assert " called run.evaluate at test_batchnorm.py:" in text
        assert " called run.barrier at test_batchnorm.py:" in text


def average_running_mean():
    """The running mean of a moving average with use_buffers, before its evaluation and during it."""
    with Run(global_batch=7) as run, ignore_batchnorm_warning():
        inner = Normed(images())
        model = run.wrap(inner)
        averaged = AveragedModel(inner, use_buffers=True)
        train_on_images(run, model, lambda: averaged.update_parameters(inner))
        before = averaged.module.norm.running_mean.clone()
        with run.evaluate(averaged) as net_in_evaluation:
            return before, net_in_evaluation.module.norm.running_mean.clone()


def instance_norm_running_mean():
    """The running mean of an InstanceNorm, before an evaluation and during it, with replica checks."""
    with Run(global_batch=7, replica_check_every=1) as run:
        inner = Normed(nn.InstanceNorm2d(2, affine=True, track_running_stats=True))
        model = run.wrap(inner)
        train_on_images(run, model)
        before = inner.norm.running_mean.clone()
        with run.evaluate(model):
            return before, inner.norm.running_mean.clone()


@pytest.mark.parametrize(
    "evaluate",
    [evaluate_in_eval_mode, average_running_mean, instance_norm_running_mean],
    ids=lambda it: it.__name__,
)
def test_an_evaluation_averages_all_statistics_that_differ_between_ranks(ranks, evaluate):
    (first, after), (second, other) = ranks(2, evaluate)
    assert not torch.allclose(first, second)
    assert torch.allclose(after, (first + second) / 2)
    assert torch.equal(after, other)


def save_running_mean(folder):
    """The running mean of this rank before a checkpoint, and the one in the checkpoint."""
    with Run(global_batch=7, folder="logs") as run, ignore_batchnorm_warning():
        inner = Normed(images())
        model = run.wrap(inner)
        data = run.shard(IMAGES[:12])
        checkpoint = run.checkpoint(folder, model=model, train=data)
        for epoch in data.epochs(1):
            for step in epoch:
                for x in step:
                    step.mean(model(x).squeeze(1)).backward()
        before = inner.norm.running_mean.clone()
        checkpoint.save()
    with Run(global_batch=7, folder="logs") as run, ignore_batchnorm_warning():
        inner = Normed(images())
        run.checkpoint(folder, model=run.wrap(inner), train=run.shard(IMAGES[:12]))
        return before, inner.norm.running_mean.clone()


def test_a_checkpoint_holds_the_averaged_statistics(ranks, tmp_path):
    (first, kept), (second, again) = ranks(2, save_running_mean, tmp_path / "out")
    assert not torch.allclose(first, second)
    assert torch.allclose(kept, (first + second) / 2)
    assert torch.equal(kept, again)


def wrap_twice():
    with Run(global_batch=4) as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run.wrap(Normed(images()))
        run.wrap(Normed(images(), frozen=True))
        return [(str(w.message), w.filename) for w in given]


def test_unsynced_batchnorm_is_warned_of_once_at_the_users_line(ranks):
    first, second = ranks(2, wrap_twice)
    assert first == [(PER_RANK, __file__)]
    assert second == []
    assert ranks(1, wrap_twice) == [[]]


def test_micro_batches_of_a_single_rank_get_no_padding(ranks):
    rows, kept, _, given = ranks(1, train, images, IMAGES[:7], 7, 4)[0]
    assert rows == [4, 3]
    assert torch.allclose(kept, running_mean(IMAGES[:4], IMAGES[4:7]))
    assert given == []


@pytest.mark.slow
def test_a_rank_with_only_padding_is_warned_of_once(ranks):
    by_rank = ranks(4, train, images, IMAGES[:10], 4)
    assert [rows for rows, *_ in by_rank] == [[1, 1, 1]] * 4
    assert by_rank[0][3] == [
        PER_RANK,
        "step 2 of each epoch has 2 sample(s) for 4 rank(s) with 1 micro-batch(es) each, and BatchNorm needs 1 rows at "
        "a time: samestep adds padding rows, which have weight 0 in the loss but enter the BatchNorm statistics; pass "
        "another global_batch or micro_batch, or run.shard(drop_last=True)",
    ]
    assert all(given == [] for *_, given in by_rank[1:])


def test_a_single_row_has_no_variance_so_padding_is_added_with_a_warning(ranks):
    (rows0, *_, given), (rows1, *_) = ranks(2, train, vectors, ROWS[:3], 3)
    assert (rows0, rows1) == ([2], [2])
    assert "has 3 sample(s) for 2 rank(s) with 1 micro-batch(es) each, and BatchNorm needs 2 rows at a time" in given[1]


def test_without_a_trainable_batchnorm_all_ranks_have_equal_shapes(ranks):
    for rows, kept, _, given in ranks(2, train, images, IMAGES[:12], 7, None, True):
        assert rows == [4, 3]
        assert given == []
        assert not kept.any()


def test_synchronized_statistics_equal_those_of_a_single_rank(ranks):
    alone = ranks(1, train, images, IMAGES[:12], 7)[0]
    for size in (2, 3):
        for _, before, after, given in ranks(size, train, images, IMAGES[:12], 7, None, False, True):
            assert torch.allclose(before, alone[1], atol=1e-7)
            assert torch.allclose(after[1], alone[2][1], atol=1e-7)
            assert given == []


CASES = {
    "plain": {},
    "momentum by count": {"momentum": None},
    "no affine": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


def normalize(case):
    """Two uneven batches through a synchronized norm: outputs, gradients and running statistics of this rank."""
    with Run(global_batch=1) as run:
        norm = nn.BatchNorm1d(2, dtype=torch.float64, **CASES[case])
        model = sync_batchnorm(nn.Sequential(norm), torch.device("cpu"))
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
        seen = []
        for part in (torch.stack(ROWS[:9]).double(), torch.stack(ROWS[9:15]).double()):
            mine = part.tensor_split([len(part) // 3])[run.rank].requires_grad_()
            out = model(mine)
            (out**3).sum().backward()
            seen.append((out.detach(), mine.grad))
        model.eval()
        seen.append((model(torch.ones(3, 2, dtype=torch.float64)).detach(), norm.running_var))
        return type(model[0]) is CpuSyncBatchNorm, seen


@pytest.mark.parametrize("case", CASES)
def test_cpu_sync_batchnorm_equals_torchs_batchnorm_over_all_rows(ranks, case):
    (ours, first), (_, second) = ranks(2, normalize, case)
    assert ours
    norm = nn.BatchNorm1d(2, dtype=torch.float64, **CASES[case])
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
    for at, part in enumerate((torch.stack(ROWS[:9]).double(), torch.stack(ROWS[9:15]).double())):
        rows = part.requires_grad_()
        out = norm(rows)
        (out**3).sum().backward()
        assert torch.allclose(torch.cat([first[at][0], second[at][0]]), out.detach(), atol=1e-12)
        assert torch.allclose(torch.cat([first[at][1], second[at][1]]), rows.grad, atol=1e-12)
    norm.eval()
    assert torch.allclose(first[2][0], norm(torch.ones(3, 2, dtype=torch.float64)).detach(), atol=1e-12)
    if norm.running_var is not None:
        assert torch.allclose(first[2][1], norm.running_var, atol=1e-12)


def one_value():
    with Run(global_batch=1):
        CpuSyncBatchNorm(2)(torch.ones(1 if torch.distributed.get_rank() == 0 else 0, 2))


def test_a_norm_over_one_value_raises_as_in_torch(ranks):
    for text in ranks.errors(2, one_value):
        assert "ValueError: Expected more than 1 value per channel when training, got input size" in text
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_norm(torch.ones(1, 2), None, None, training=True)
