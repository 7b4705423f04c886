"""run.gather: rows of all ranks in global order, and the gradients of a contrastive loss on one rank."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from samestep import Run, SamestepWarning
from tests.ranks.models import Mlp
from tests.warm import RankFailed

N = 17  # with a global batch of 7: steps of 7, 7 and 3 samples, fewer than four ranks


def pairs():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64)
    return [(x[i], x[i] + 0.1, torch.tensor(i % 3)) for i in range(N)]


def clip(run, step, model, one, two, labels):
    """Each sample's first view finds its second view among all, and the other way around."""
    a, b = normalize(model(one), dim=1), normalize(model(two), dim=1)
    scores_a, scores_b = a @ run.gather(b).T / 0.5, b @ run.gather(a).T / 0.5
    return cross_entropy(scores_a, step.rows, reduction="none") + cross_entropy(scores_b, step.rows, reduction="none")


def simclr(run, step, model, one, two, labels):
    """NT-Xent: the negatives of a view are both views of all other samples."""
    a, b = normalize(model(torch.cat([one, two])), dim=1).chunk(2)
    everything = torch.cat([run.gather(a), run.gather(b)])
    scores, own = a @ everything.T / 0.5, step.rows
    scores = scores.scatter(1, own[:, None], float("-inf"))  # a view is not its own negative
    return cross_entropy(scores, own + step.samples, reduction="none")


def supcon(run, step, model, one, two, labels):
    """All samples of the same class are positives."""
    a, b = normalize(model(one), dim=1), normalize(model(two), dim=1)
    log_probabilities = (a @ run.gather(b).T / 0.5).log_softmax(dim=1)
    same = labels[:, None] == run.gather(labels)[None, :]
    return -(log_probabilities * same).sum(dim=1) / same.sum(dim=1)


def train(loss, strategy, micro_batch=None):
    with Run(global_batch=7, seed=3) as run:
        model = run.wrap(Mlp().double(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in run.shard(pairs(), shuffle=True, micro_batch=micro_batch).epochs(2):
            for step in epoch:
                for one, two, labels in step:
                    step.mean(loss(run, step, model, one, two, labels)).backward()
                optimizer.step()
                optimizer.zero_grad()
        full = [getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()]
        return torch.cat([p.flatten() for p in full]).tolist()


@pytest.mark.parametrize("loss", [clip, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (simclr, supcon))])
def test_a_contrastive_loss_trains_as_on_one_rank(ranks, loss):
    (expected,) = ranks(1, train, loss, None)
    for size, strategy in ((2, "ddp"), (3, "fsdp"), (4, "ddp")):
        for weights in ranks(size, train, loss, strategy):
            assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)


def gathered(dtype, strategy=None):
    """All samples in every way: in each step, and in an evaluation."""
    data = [torch.tensor([i, i + 1]).to(dtype) for i in range(10)]
    with Run(global_batch=7) as run:
        model = run.wrap(nn.Linear(1, 1), strategy)
        in_steps, own = [], []
        for epoch in run.shard(data).epochs(1):
            for step in epoch:
                for x in step:
                    everything = run.gather(x)
                    own.append(bool((everything[step.rows] == x)[step.weights > 0].all()))
                    in_steps.append(everything.tolist())
        with run.evaluate(model) as net:
            test = run.gather((x + 0 * net(x[:, :1].float())).to(dtype) for x in run.shard(data, micro_batch=1))
        several = run.gather(data[0][:1].repeat(run.rank)).tolist()
        return in_steps, own, test.tolist(), str(test.dtype), several


@pytest.mark.parametrize(
    ("dtype", "size", "strategy"),
    [(torch.int64, 1, None), (torch.bool, 2, None), (torch.bfloat16, 3, "fsdp"), (torch.float64, 4, None)],
)
def test_rows_come_in_global_order_and_without_padding(ranks, dtype, size, strategy):
    expected = [torch.tensor([i, i + 1]).to(dtype).tolist() for i in range(10)]
    for in_steps, own, test, kind, several in ranks(size, gathered, dtype, strategy):
        assert in_steps == [expected[:7], expected[7:]]
        assert all(own)
        assert test == expected
        assert kind == str(dtype)
        assert several == [expected[0][0]] * sum(range(size))


def test_a_rank_without_a_batch_gets_the_rows_of_the_others(ranks):
    for rows in ranks(4, few_samples):
        assert rows == [[0.0], [1.0]]


def few_samples():
    with Run(global_batch=4) as run:
        return run.gather(run.shard([torch.tensor([0.0]), torch.tensor([1.0])])).tolist()


def test_several_micro_batches_raise(ranks):
    for text in ranks.errors(2, train, clip, "ddp", 2):
        assert (
            "StepError: this step has 2 micro-batches per rank, and run.gather and step.rows see one: rows of the "
            "others would be missing, so the loss would depend on the micro-batch; pass a larger micro_batch, use more "
            "ranks, or reduce global_batch" in text
        )


def test_a_micro_batch_halved_for_lack_of_memory_raises(ranks, monkeypatch):
    monkeypatch.setenv("SAMESTEP_OOM_RETRIES", "1")
    for text in ranks.errors(1, train, clip, None):
        assert "this step has 2 micro-batches per rank (samestep has halved the micro-batch, which ran out of" in text


def gather_wrong(what):
    with Run(global_batch=4) as run:
        for epoch in run.shard(list(torch.ones(4, 2))).epochs(1):
            for step in epoch:
                for x in step:
                    run.gather(what(x, run.rank))


def two_views(x, rank):
    return torch.cat([x, x])


def list_of_views(x, rank):
    return [x, x]


def scalar(x, rank):
    return x.sum()


def number(x, rank):
    return 3


def other_dtype(x, rank):
    return x.double() if rank else x


def other_width(x, rank):
    return x[:, :1] if rank else x


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            two_views,
            r"run.gather needs one row for each of the 2 rows of this micro-batch, got shape \(4, 2\): gather ",
        ),
        (
            list_of_views,
            "run.gather needs one row for each of the 2 rows of this micro-batch, got an iterable of tensors: gather ",
        ),
        (scalar, r"run.gather needs a tensor with one row per sample, .* got a tensor without dimensions: for single"),
        (number, r"run.gather needs a tensor with one row per sample, or an iterable of such tensors, got a int: for"),
        (other_dtype, r"rows of shape \(2,\) and torch.float\d\d on rank \d, and of shape \(2,\) and torch.float\d\d"),
        (other_width, r"rows of shape \(\d,\) and torch.float32 on rank \d, and of shape \(\d,\) and torch.float32 on"),
    ],
)
def test_what_cannot_be_gathered_raises(ranks, what, message):
    for text in ranks.errors(2, gather_wrong, what):
        assert re.search(message, text)


def nothing():
    with Run(global_batch=4) as run:
        run.gather([])


@pytest.mark.parametrize("size", [1, 2])
def test_no_rows_on_any_rank_raise(ranks, size):
    for text in ranks.errors(size, nothing):
        assert "CommunicationError: run.gather got no tensor on any rank: is the dataset empty?" in text


def on_one_rank_only():
    with Run(global_batch=4) as run:
        if run.is_main:
            run.gather(torch.ones(1))
        else:
            run.barrier()


def test_another_collective_is_named(ranks):
    for text in ranks.errors(2, on_one_rank_only):
        assert re.search(r"rank \d called run\.\w+ at test_gather.py:\d+ while rank \d called run\.\w+ at test_g", text)


def local_clip(run, step, model, one, two, labels):
    scores = normalize(model(one), dim=1) @ normalize(model(two), dim=1).T
    return cross_entropy(scores, torch.arange(len(one)), reduction="none")


def local_simclr(run, step, model, one, two, labels):
    z = model(torch.cat([one, two]))
    scores = torch.einsum("id,jd->ij", z, z)
    return scores.logsumexp(dim=1).reshape(2, -1).sum(dim=0)


def local_distances(run, step, model, one, two, labels):
    return torch.cdist(model(one), model(two)).mean(dim=1)


def row_by_row(run, step, model, one, two, labels):
    """As many features as rows: the products with weights of 4 x 4 and 3 x 3 compare no rows."""
    weight = nn.Parameter(torch.ones(len(one), 6, dtype=torch.float64))
    return (nn.functional.linear(one, weight).sum(dim=1) + (model(one) - model(two)).sum(dim=1)) ** 2


def warnings_of(loss, micro_batch=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(loss, None, micro_batch)
    return [str(one.message) for one in caught if issubclass(one.category, SamestepWarning)]


@pytest.mark.parametrize(
    ("loss", "size", "micro_batch", "rows"),
    [(local_clip, 2, None, 4), (local_simclr, 2, None, 4), (local_distances, 2, None, 4), (local_clip, 1, 3, 3)],
)
def test_a_loss_that_compares_rows_without_gather_warns_once(ranks, loss, size, micro_batch, rows):
    side = 2 * rows if loss is local_simclr else rows
    expected = (
        f"the loss compares the {rows} rows of a micro-batch with each other (in a {side} x {side} matrix), but not "
        f"with the other rows of the global batch ({size} rank(s) with {3 if micro_batch else 1} micro-batch(es) "
        "each), so the result depends on their number: gather the rows of all ranks with run.gather, as in "
        "`cross_entropy(z1 @ run.gather(z2).T, step.rows, reduction='none')`"
    )
    first, *others = ranks(size, warnings_of, loss, micro_batch)
    assert first == [expected]
    assert not any(others)


@pytest.mark.parametrize(("loss", "size"), [(local_clip, 1), (clip, 2), (simclr, 2), (row_by_row, 2)])
def test_other_losses_do_not_warn(ranks, loss, size):
    assert ranks(size, warnings_of, loss) == [[]] * size


def own_labels(run, step, model, one, two, labels):
    """The labels of one process, 0, 1, 2, ..., on every rank."""
    scores = model(one) @ run.gather(model(two)).T
    return cross_entropy(scores, torch.arange(len(scores)), reduction="none")


@pytest.mark.slow
def test_labels_that_count_from_0_on_every_rank_raise(ranks):
    expected = (
        "the loss compares rows with run.gather(...) and has the labels 0 to 3, but the first row of this rank is row "
        "4 of the global batch: use step.rows instead of torch.arange(...), as in "
        "`cross_entropy(z1 @ run.gather(z2).T, step.rows, reduction='none')`"
    )
    with pytest.raises(RankFailed) as failed:  # only rank 1 raises, and rank 0 waits for it
        ranks(2, train, own_labels, "ddp")
    assert expected in failed.value.errors[1]


def gathered_objects():
    with Run(global_batch=4) as run:
        big = torch.arange(6.0).reshape(3, 2)
        mine = {"rank": run.rank, "view": big[run.rank :, 1], "names": ("a",) * run.rank, "bf16": big[:1].bfloat16()}
        found = run.gather_objects(mine)
        found[0]["view"] += 1  # copies, also of this rank's own object
        return [
            (each["rank"], each["view"].tolist(), each["names"], each["bf16"].dtype) for each in found
        ], big.tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_the_objects_of_all_ranks(ranks, size):
    columns = [[2.0, 4.0, 6.0], [3.0, 5.0], [5.0]]
    expected = [(rank, columns[rank], ("a",) * rank, torch.bfloat16) for rank in range(size)]
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert ranks(size, gathered_objects) == [(expected, whole)] * size


def special_tensors():
    tensors = [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.tensor([True]),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(2).to_sparse(),
        nn.Parameter(torch.ones(2)),
    ]
    with Run(global_batch=4) as run:
        return tensors, run.gather_objects(tensors)[-1]


def test_tensors_of_any_kind_are_gathered(ranks):
    for tensors, found in ranks(2, special_tensors):
        for one, other in zip(tensors, found, strict=True):
            assert (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
            assert torch.equal(one.to_dense(), other.to_dense())


def gather_a_lambda(on_rank):
    with Run(global_batch=4) as run:
        run.gather_objects({"f": (lambda: 1) if run.rank == on_rank else 1})


@pytest.mark.parametrize(("size", "on_rank"), [(1, 0), (2, 1)])
def test_an_object_that_does_not_pickle_is_named_on_every_rank(ranks, size, on_rank):
    for text in ranks.errors(size, gather_a_lambda, on_rank):
        assert f"CommunicationError: run.gather_objects cannot pickle what rank {on_rank} passed, a dict: " in text
        assert "pass numbers, text, tensors, or lists and dictionaries of them, and no lambda, open file" in text
