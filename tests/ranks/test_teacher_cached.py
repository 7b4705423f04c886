"""Cached outputs: computed once per sample, read with any world size, never returned for other inputs."""

import json
import math
import os
import signal
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.data.sample_rng import sample_rng
from samestep.nn import TopK, distill_loss
from tests.ranks.teachers import Student, Teacher, tokens, train_with, write_teacher

N = 23


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "teacher.safetensors"
    write_teacher(path)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


class Counted(Teacher):
    """Counts the rows that it computes, and kills its process after `most` rows."""

    rows, most = 0, math.inf

    def forward(self, tokens):
        if Counted.rows > Counted.most:
            os.kill(os.getpid(), signal.SIGKILL)
        Counted.rows += len(tokens)
        return super().forward(tokens)


def train_cached(path, cache, epochs=2, inner=None, micro_batch=2):
    """The weights of a student, and how many rows this rank computed."""
    Counted.rows = 0
    options = {"placement": "cached", "cache": cache, "inner": inner}
    weights = train_with(path, options, build=Counted, epochs=epochs, micro_batch=micro_batch)
    return weights, Counted.rows


def train_with_copy(path, epochs=2):
    return train_with(path, {"placement": "gpu"}, epochs=epochs)


def assert_same_weights(trained, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=0)


def cached_rows(cache):
    """The number of rows in a cache: each record has 56 bytes."""
    return sum(path.stat().st_size for path in cache.glob("*.index")) / 56


@pytest.mark.parametrize("inner", [None, "sharded", "served"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_student_trains_the_same_and_each_sample_is_computed_once(ranks, weights, cache, size, inner):
    ((wanted,), by_rank) = ranks(1, train_with_copy, weights), ranks(size, train_cached, weights, cache, 2, inner)
    for trained, _ in by_rank:
        assert_same_weights(trained, wanted)
    assert cached_rows(cache) == N, "each sample once, and padding never"
    one_epoch = ranks(size, train_cached, weights, cache.with_name("another"), 1, inner)
    assert [rows for _, rows in by_rank] == [rows for _, rows in one_epoch], "nothing is computed in the second"


@pytest.mark.slow
def test_another_world_size_reads_the_cache_and_loads_no_teacher(ranks, weights, cache):
    (wanted,) = ranks(1, train_with_copy, weights)
    ranks(3, train_cached, weights, cache, 1)
    for size in (1, 2):
        for trained, rows in ranks(size, train_cached, weights, cache, 2):
            assert_same_weights(trained, wanted)
            assert rows == 0
    assert cached_rows(cache) == N


def killed_midway(path, cache):
    Counted.rows, Counted.most = 0, 8
    train_with(path, {"placement": "cached", "cache": cache}, build=Counted, epochs=1)


@pytest.mark.slow
def test_the_rows_of_a_killed_run_are_used_by_the_next(ranks, weights, cache):
    ranks.errors(1, killed_midway, weights, cache)
    before = cached_rows(cache)
    assert 0 < before < N
    (torn,) = cache.glob("*.index")
    with torn.open("ab") as file:
        file.write(b"\x07" * 30)  # a partially written record
    with torn.with_suffix(".rows").open("ab") as file:
        file.write(b"half a row")
    (wanted,) = ranks(1, train_with_copy, weights)
    ((trained, rows),) = ranks(1, train_cached, weights, cache)
    assert_same_weights(trained, wanted)
    assert N - before <= rows <= N - before + 5
    assert ranks(1, train_cached, weights, cache)[0][1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_corrupt_row_is_computed_again_once(ranks, weights, cache, size):
    ranks(1, train_cached, weights, cache, 1)
    (rows,) = cache.glob("*.rows")
    data = bytearray(rows.read_bytes())
    data[-5] ^= 1
    rows.write_bytes(data)
    by_rank = ranks(size, train_cached, weights, cache, 3)
    assert 0 < sum(computed for _, computed in by_rank) <= 2 * size, "one micro-batch, in the first epoch"
    assert cached_rows(cache) == N + 1, "it was replaced, permanently"
    (wanted,) = ranks(1, train_with_copy, weights, 3)
    for trained, _ in by_rank:
        assert_same_weights(trained, wanted)
    for again in (1, 2):
        assert [computed for _, computed in ranks(again, train_cached, weights, cache)] == [0] * again
    assert cached_rows(cache) == N + 1


def test_drafts_of_a_killed_run_are_removed_when_they_are_old(ranks, weights, cache):
    cache.mkdir()
    old, young = cache / ".teacher.json.123", cache / ".teacher.json.456"
    for draft in (old, young):
        draft.write_text('{"format"')
    os.utime(old, (0, 0))
    ranks(1, train_cached, weights, cache, 1)
    assert not old.exists()
    assert young.exists(), "another run may be writing it"
    assert cached_rows(cache) == N


class Augmented(torch.utils.data.Dataset):
    """Tokens of which one is random in every epoch."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        text = tokens()[index].clone()
        text[3] = torch.randint(0, 13, (), generator=sample_rng())
        return text


def augment(path, cache):
    with Run(global_batch=7, start_timeout=30, step_timeout=30) as run:
        teacher = run.teacher(Teacher, weights=path, placement="cached", cache=cache)
        for epoch in run.shard(Augmented(), shuffle=True, num_workers=0, name="texts").epochs(2):
            for step in epoch:
                for batch in step:
                    teacher(batch)


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_with_random_augmentation_are_rejected(ranks, weights, cache, size):
    texts = ranks.errors(size, augment, weights, cache)
    messages = [text for text in texts if "TeacherError: sample " in text]
    assert messages
    for text in messages:
        assert " of texts has other inputs in epoch 1 than in epoch 0, whose outputs are in the cache " in text
        assert "a cache needs inputs that stay the same. If they are augmented at random, or padded to" in text
        assert "delete the folder, or pass another one as cache=" in text
    for text in texts:
        assert "has other inputs in epoch 1" in text, "the other ranks report the reason"


def train_on_other_data(path, cache):
    """Another run with other data."""
    with Run(global_batch=7) as run:
        teacher = run.teacher(Counted, weights=path, placement="cached", cache=cache)
        for epoch in run.shard(TensorDataset(tokens().flip(0))).epochs(1):
            for step in epoch:
                for (batch,) in step:
                    teacher(batch)


def test_other_inputs_than_in_an_earlier_run_are_rejected_with_the_remedy(ranks, weights, cache):
    ranks(1, train_cached, weights, cache, 1)
    (text,) = ranks.errors(1, train_on_other_data, weights, cache)
    assert f" has other inputs in epoch 0 than in epoch 0 of the earlier run that wrote the cache {cache}:" in text
    assert "If the data, its order, its tokenizer or the names of the shards have changed, pass" in text
    assert "another folder as cache=, or delete this one; if inputs are augmented at random, or padded" in text


def reopen(path, cache, build=Teacher, **options):
    with Run(global_batch=7) as run:
        run.teacher(build, weights=path, placement="cached", cache=cache, **options)


def reopen_in_half(path, cache):
    reopen(path, cache, dtype=torch.bfloat16)


def reopen_compressed(path, cache):
    reopen(path, cache, top_k=3)


def test_a_cache_of_another_teacher_is_rejected_on_all_ranks(ranks, weights, cache, tmp_path):
    other = tmp_path / "other.safetensors"
    write_teacher(other, seed=4)
    ranks(1, train_cached, weights, cache, 1)
    for text in ranks.errors(2, reopen, other, cache):
        assert f"TeacherError: the cache {cache} belongs to another teacher: its teacher is " in text
        assert "pass another folder as cache=, or delete this one" in text
    assert (
        "its dtype is None, that of this teacher is torch.bfloat16"
        in ranks.errors(1, reopen_in_half, weights, cache)[0]
    )
    assert "its top_k is None, that of this teacher is 3" in ranks.errors(1, reopen_compressed, weights, cache)[0]
    assert "its module is Counted, that of this teacher is Teacher" in ranks.errors(1, reopen, weights, cache)[0]


def test_a_folder_that_is_not_a_cache_is_rejected(ranks, weights, cache):
    cache.mkdir()
    (cache / "notes.txt").write_text("mine")
    (text,) = ranks.errors(1, reopen, weights, cache)
    assert f"TeacherError: {cache} holds files but no teacher.json, so it is not a teacher's cache" in text
    (cache / "teacher.json").write_text("{")
    (text,) = ranks.errors(1, reopen, weights, cache)
    assert f"TeacherError: {cache}/teacher.json was not written by samestep (" in text
    (text,) = ranks.errors(1, reopen, weights, cache / "notes.txt")
    assert "cannot open the cache " in text
    assert "pass a folder that can be written as cache=" in text


def run_top_k(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Teacher, weights=path, placement="cached", cache=cache, top_k=3, temperature=2.0)
        answers, losses = [], []
        for epoch in run.shard(TensorDataset(tokens())).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    answers.append(teacher(batch))
                    losses.append(distill_loss(torch.zeros(len(batch), 6, 13), answers[-1], 2.0))
        return answers, losses


def test_top_k_logits_are_cached_instead_of_all(ranks, weights, cache):
    ((answers, losses),) = ranks(1, run_top_k, weights, cache)
    half = len(answers) // 2
    for first, second in zip(answers[:half], answers[half:], strict=True):
        assert isinstance(second, TopK)
        assert first.temperature == second.temperature == 2.0
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[:3], second[:3], strict=True))
    for first, second in zip(losses[:half], losses[half:], strict=True):
        assert torch.equal(first, second)


def evaluate(path, cache, inner):
    """The mean loss of two evaluations over uneven parts, and the number of computed rows."""
    with Run(global_batch=8, start_timeout=30, step_timeout=30) as run:
        Counted.rows = 0
        teacher = run.teacher(Counted, weights=path, placement="cached", cache=cache, inner=inner)
        model, test = run.wrap(Student()), run.shard(TensorDataset(tokens()), micro_batch=1)
        found = []
        for _ in range(2):
            with run.evaluate(model) as net:
                found.append(run.mean(distill_loss(net(x), teacher(x)).mean(1) for (x,) in test))
        return found, Counted.rows


@pytest.mark.slow
@pytest.mark.parametrize("inner", [None, "sharded"])
def test_an_evaluation_of_uneven_parts_is_cached(ranks, weights, cache, inner, tmp_path):
    (((wanted, _), _),) = ranks(1, evaluate, weights, tmp_path / "one", None)
    for (first, second), _ in ranks(3, evaluate, weights, cache, inner):
        assert first == second == pytest.approx(wanted, abs=1e-6)
    assert cached_rows(cache) == N


class Pooled(Teacher):
    """Returns a tensor without one row per sample."""

    def forward(self, tokens):
        return super().forward(tokens).mean()


def pooled(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Pooled, weights=path, placement="cached", cache=cache)
        for epoch in run.shard(TensorDataset(tokens())).epochs(1):
            for step in epoch:
                for (batch,) in step:
                    teacher(batch)


def other_rows(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Teacher, weights=path, placement="cached", cache=cache)
        for epoch in run.shard(TensorDataset(tokens())).epochs(1):
            for step in epoch:
                for (batch,) in step:
                    teacher(torch.cat([batch, batch]))


def outside(path, cache):
    with Run(global_batch=7) as run:
        run.teacher(Teacher, weights=path, placement="cached", cache=cache)(tokens(2))


def test_outputs_that_cannot_be_cached_by_sample_are_rejected(ranks, weights, cache):
    messages = {use: ranks.errors(1, use, weights, cache / use.__name__)[0] for use in (pooled, other_rows, outside)}
    assert (
        "the teacher returns a tensor of shape () for 7 samples, but a cache stores one row for each"
        in messages[pooled]
    )
    assert "the teacher got tensors of shapes [(14, 6)] for the 7 samples of this batch" in messages[other_rows]
    assert "placement='cached' stores outputs by sample, but no sample is current: call" in messages[outside]


@contextmanager
def full(cache):
    """Limit the size of all files to that of the cache."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(path.stat().st_size for path in cache.glob("*.rows")), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def full_disk(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Counted, weights=path, placement="cached", cache=cache, inner="cpu")
        for epoch in run.shard(TensorDataset(tokens())).epochs(1):
            for number, step in enumerate(epoch):
                for (batch,) in step:
                    # only around the call, because the log of the run may be longer
                    with full(cache) if number == 2 else nullcontext():
                        teacher(batch)


def test_a_full_disk_is_reported_and_the_rows_so_far_stay_valid(ranks, weights, cache):
    (text,) = ranks.errors(1, full_disk, weights, cache)
    assert f"TeacherError: cannot write to the cache {cache}: the file would exceed the size limit: raise the" in text
    assert ", or pass another folder as cache=; the rows written so far stay valid" in text
    assert cached_rows(cache) == 14
    rows = ranks(1, train_cached, weights, cache, 1)[0][1]
    assert N - 14 <= rows <= N
    assert json.loads((cache / "teacher.json").read_text())["format"] == 3


class Named(nn.Module):
    """Returns outputs by name in a mapping class."""

    def __init__(self):
        super().__init__()
        self.body = Teacher()

    def forward(self, tokens, scale=1.0):
        from collections import OrderedDict

        logits = self.body(tokens) * scale
        return OrderedDict(logits=logits, hidden=(logits.sum(-1), logits.to(torch.bfloat16)), label="a")


def write_named(path):
    from safetensors.torch import load_file, save_file

    write_teacher(path)
    save_file({f"body.{name}": value for name, value in load_file(path).items()}, path)


def named(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Named, weights=path, placement="cached", cache=cache)
        answers = []
        for epoch in run.shard(TensorDataset(tokens())).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    out = teacher(tokens=batch, scale=2.0)
                    answers.append((type(out).__name__, out["logits"], *out["hidden"], out["label"]))
        return answers


def test_cached_outputs_keep_their_structure(ranks, cache, tmp_path):
    path = tmp_path / "named.safetensors"
    write_named(path)
    (answers,) = ranks(1, named, path, cache)
    half = len(answers) // 2
    for first, second in zip(answers[:half], answers[half:], strict=True):
        assert first[0] == second[0] == "OrderedDict"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[1:4], second[1:4], strict=True))
        assert first[3].dtype == torch.bfloat16
        assert first[4] == second[4] == "a"
