"""BatchNorm over ranks: statistics averaged or common, and copies that fill a batch kept out of them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from samestep import Run
from samestep.parallel.batchnorm import CpuSyncBatchNorm, sync_batchnorm
from tests.ranks.expected import batchnorm_of_one_rank

LUCK = torch.Generator().manual_seed(4)
IMAGES = list(torch.randn(20, 2, 3, 3, generator=LUCK))
ROWS = list(torch.randn(20, 2, generator=LUCK))
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
        with batchnorm_of_one_rank():
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
    """What BatchNorm keeps after these batches, by hand."""
    kept = torch.zeros(2)
    for batch in batches:
        kept = 0.9 * kept + 0.1 * torch.stack(batch).mean(dim=(0, 2, 3))
    return kept


def test_copies_never_enter_the_statistics_where_a_sample_remains(ranks):
    first, second = ranks(2, train, images, IMAGES[:12], 7)
    assert first[0] == [4, 3]  # steps of 7 and 5: four and three samples here, three and two there, none filled up
    assert second[0] == [3, 2]
    assert torch.allclose(first[1], running_mean(IMAGES[:4], IMAGES[7:10]))
    assert torch.allclose(second[1], running_mean(IMAGES[4:7], IMAGES[10:12]))
    assert first[3] == [PER_RANK]
    assert second[3] == []


def test_copies_stay_out_of_a_stream_too(ranks):
    assert ranks(2, train_on_stream, 7) == [[4, 3], [3, 2]]


def test_statistics_are_averaged_for_evaluation_and_not_those_of_one_rank(ranks):
    first, second = ranks(2, train, images, IMAGES[:12], 7)
    assert not torch.allclose(first[1], second[1])
    for after in (first[2], second[2]):
        assert torch.allclose(after[0], (first[1] + second[1]) / 2)
    assert torch.equal(first[2][1], second[2][1])


def learn_from_images(run, model, after_step=lambda: None):
    """One epoch, of which ranks see different rows."""
    for epoch in run.shard(IMAGES[:12]).epochs(1):
        for step in epoch:
            for x in step:
                step.mean(model(x).squeeze(1)).backward()
            after_step()


def evaluate_what_sleeps_already():
    """The running mean of this rank in an evaluation that the user's own model.eval() came before."""
    with Run(global_batch=7) as run, batchnorm_of_one_rank():
        inner = Normed(images())
        model = run.wrap(inner)
        learn_from_images(run, model)
        before = inner.norm.running_mean.clone()
        model.eval()
        with run.evaluate(model):
            return before, inner.norm.running_mean.clone()


def evaluate_on_the_first_rank_only():
    with Run(global_batch=7, start_timeout=20) as run, batchnorm_of_one_rank():
        model = run.wrap(Normed(images()))
        if run.is_main:
            with run.evaluate(model):
                pass
        run.barrier()


def test_an_evaluation_of_one_rank_alone_is_told_and_meets_no_other_collective(ranks):
    for text in ranks.errors(2, evaluate_on_the_first_rank_only):
        assert "CommunicationError: rank " in text
        assert " called averaging BatchNorm statistics at test_batchnorm.py:" in text
        assert " called run.barrier at test_batchnorm.py:" in text


def follow_statistics():
    """The running mean of a moving average that follows buffers too, before its evaluation and in it."""
    with Run(global_batch=7) as run, batchnorm_of_one_rank():
        inner = Normed(images())
        model = run.wrap(inner)
        averaged = AveragedModel(inner, use_buffers=True)
        learn_from_images(run, model, lambda: averaged.update_parameters(inner))
        before = averaged.module.norm.running_mean.clone()
        with run.evaluate(averaged) as judged:
            return before, judged.module.norm.running_mean.clone()


def keep_statistics_of_instances():
    """The running mean of an InstanceNorm that keeps one, before an evaluation and in it, with replicas compared."""
    with Run(global_batch=7, replica_check_every=1) as run:
        inner = Normed(nn.InstanceNorm2d(2, affine=True, track_running_stats=True))
        model = run.wrap(inner)
        learn_from_images(run, model)
        before = inner.norm.running_mean.clone()
        with run.evaluate(model):
            return before, inner.norm.running_mean.clone()


@pytest.mark.parametrize(
    "evaluate",
    [evaluate_what_sleeps_already, follow_statistics, keep_statistics_of_instances],
    ids=lambda it: it.__name__,
)
def test_an_evaluation_averages_whatever_statistics_ranks_have_of_their_own(ranks, evaluate):
    (first, after), (second, other) = ranks(2, evaluate)
    assert not torch.allclose(first, second)
    assert torch.allclose(after, (first + second) / 2)
    assert torch.equal(after, other)


def save_what_ranks_learnt(folder):
    """The running mean of this rank before a checkpoint, and that of the checkpoint, read by all ranks."""
    with Run(global_batch=7, folder="logs") as run, batchnorm_of_one_rank():
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
    with Run(global_batch=7, folder="logs") as run, batchnorm_of_one_rank():
        inner = Normed(images())
        run.checkpoint(folder, model=run.wrap(inner), train=run.shard(IMAGES[:12]))
        return before, inner.norm.running_mean.clone()


def test_a_checkpoint_holds_the_average_and_not_the_statistics_of_one_rank(ranks, tmp_path):
    (first, kept), (second, again) = ranks(2, save_what_ranks_learnt, tmp_path / "out")
    assert not torch.allclose(first, second)
    assert torch.allclose(kept, (first + second) / 2)
    assert torch.equal(kept, again)


def wrap_twice():
    with Run(global_batch=4) as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run.wrap(Normed(images()))
        run.wrap(Normed(images(), frozen=True))
        return [(str(w.message), w.filename) for w in given]


def test_batchnorm_of_one_rank_is_warned_of_once_at_the_line_of_the_user(ranks):
    first, second = ranks(2, wrap_twice)
    assert first == [(PER_RANK, __file__)]
    assert second == []
    assert ranks(1, wrap_twice) == [[]]


def test_micro_batches_of_one_rank_are_not_filled_up_either(ranks):
    rows, kept, _, given = ranks(1, train, images, IMAGES[:7], 7, 4)[0]
    assert rows == [4, 3]
    assert torch.allclose(kept, running_mean(IMAGES[:4], IMAGES[4:7]))
    assert given == []


@pytest.mark.slow
def test_a_rank_with_nothing_but_copies_is_told_of_once(ranks):
    by_rank = ranks(4, train, images, IMAGES[:10], 4)
    assert [rows for rows, *_ in by_rank] == [[1, 1, 1]] * 4
    assert by_rank[0][3] == [
        PER_RANK,
        "step 2 of each epoch has 2 sample(s) for 4 rank(s) in 1 micro-batch(es) each, and BatchNorm needs 1 at a "
        "time: copies fill in, which weigh nothing in the loss but enter the statistics of BatchNorm; another "
        "global_batch or micro_batch, or run.shard(drop_last=True), avoids it",
    ]
    assert all(given == [] for *_, given in by_rank[1:])


def test_one_row_has_no_variance_so_a_copy_joins_it_and_that_is_said(ranks):
    (rows0, *_, given), (rows1, *_) = ranks(2, train, vectors, ROWS[:3], 3)
    assert (rows0, rows1) == ([2], [2])
    assert "has 3 sample(s) for 2 rank(s) with 1 micro-batch(es) each, and BatchNorm needs 2 rows at a time" in given[1]


def test_without_a_batchnorm_that_learns_all_ranks_have_equal_shapes(ranks):
    for rows, kept, _, given in ranks(2, train, images, IMAGES[:12], 7, None, True):
        assert rows == [4, 3]
        assert given == []
        assert not kept.any()


def test_common_statistics_are_those_of_one_rank(ranks):
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


def normalise(case):
    """Two uneven batches through a common norm: outputs, gradients and running statistics of this rank."""
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
def test_the_norm_over_ranks_on_the_cpu_is_torchs_norm_over_all_rows(ranks, case):
    (ours, first), (_, second) = ranks(2, normalise, case)
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


def test_a_norm_of_one_value_on_all_ranks_is_refused_as_torch_does(ranks):
    for text in ranks.errors(2, one_value):
        assert "ValueError: Expected more than 1 value per channel when training, got input size" in text
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_norm(torch.ones(1, 2), None, None, training=True)
