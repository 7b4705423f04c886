"""A teacher whose outputs are kept: computed once a sample, read on any world size, never given for other inputs."""

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
    """Counts the rows that it computes, and takes its process with it when there are too many."""

    rows, most = 0, math.inf

    def forward(self, tokens):
        if Counted.rows > Counted.most:
            os.kill(os.getpid(), signal.SIGKILL)
        Counted.rows += len(tokens)
        return super().forward(tokens)


def learn(path, cache, epochs=2, inner=None, micro_batch=2):
    """A student's weights, and how many rows were computed on this rank."""
    Counted.rows = 0
    options = {"placement": "cached", "cache": cache, "inner": inner}
    weights = train_with(path, options, build=Counted, epochs=epochs, micro_batch=micro_batch)
    return weights, Counted.rows


def from_copy(path, epochs=2):
    return train_with(path, {"placement": "gpu"}, epochs=epochs)


def alike(learnt, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(learnt[name], value, atol=1e-6, rtol=0)


def kept(cache):
    """How many rows the files of a cache hold: each record has 56 bytes."""
    return sum(path.stat().st_size for path in cache.glob("*.index")) / 56


@pytest.mark.parametrize("inner", [None, "sharded", "served"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_student_learns_the_same_and_each_sample_is_computed_once(ranks, weights, cache, size, inner):
    ((wanted,), by_rank) = ranks(1, from_copy, weights), ranks(size, learn, weights, cache, 2, inner)
    for learnt, _ in by_rank:
        alike(learnt, wanted)
    assert kept(cache) == N, "each sample once, and padding never"
    one_epoch = ranks(size, learn, weights, cache.with_name("another"), 1, inner)
    assert [rows for _, rows in by_rank] == [rows for _, rows in one_epoch], "nothing is computed in the second"


def test_another_world_size_reads_what_the_first_computed_and_loads_no_teacher(ranks, weights, cache):
    (wanted,) = ranks(1, from_copy, weights)
    ranks(3, learn, weights, cache, 1)
    for size in (1, 2):
        for learnt, rows in ranks(size, learn, weights, cache, 2):
            alike(learnt, wanted)
            assert rows == 0
    assert kept(cache) == N


def killed_midway(path, cache):
    Counted.rows, Counted.most = 0, 8
    train_with(path, {"placement": "cached", "cache": cache}, build=Counted, epochs=1)


def test_what_a_killed_run_has_kept_is_used_by_the_next(ranks, weights, cache):
    ranks.errors(1, killed_midway, weights, cache)
    before = kept(cache)
    assert 0 < before < N
    (torn,) = cache.glob("*.index")
    with torn.open("ab") as file:
        file.write(b"\x07" * 30)  # a record of which half was written
    with torn.with_suffix(".rows").open("ab") as file:
        file.write(b"half a row")
    (wanted,) = ranks(1, from_copy, weights)
    ((learnt, rows),) = ranks(1, learn, weights, cache)
    alike(learnt, wanted)
    assert N - before <= rows <= N - before + 5
    assert ranks(1, learn, weights, cache)[0][1] == 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_row_that_was_damaged_on_disk_is_computed_anew_once(ranks, weights, cache, size):
    ranks(1, learn, weights, cache, 1)
    (rows,) = cache.glob("*.rows")
    data = bytearray(rows.read_bytes())
    data[-5] ^= 1
    rows.write_bytes(data)
    by_rank = ranks(size, learn, weights, cache, 3)
    assert 0 < sum(computed for _, computed in by_rank) <= 2 * size, "one micro-batch, in the first epoch"
    assert kept(cache) == N + 1, "it was mended, for good"
    (wanted,) = ranks(1, from_copy, weights, 3)
    for learnt, _ in by_rank:
        alike(learnt, wanted)
    for again in (1, 2):
        assert [computed for _, computed in ranks(again, learn, weights, cache)] == [0] * again
    assert kept(cache) == N + 1


def test_what_a_kill_left_of_the_claim_is_no_hindrance_and_goes(ranks, weights, cache):
    cache.mkdir()
    old, young = cache / ".teacher.json.123", cache / ".teacher.json.456"
    for draft in (old, young):
        draft.write_text('{"format"')
    os.utime(old, (0, 0))
    ranks(1, learn, weights, cache, 1)
    assert not old.exists()
    assert young.exists(), "another run may be writing it"
    assert kept(cache) == N


class Augmented(torch.utils.data.Dataset):
    """Words of which one is drawn anew in every epoch."""

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
def test_inputs_that_are_augmented_at_random_are_refused(ranks, weights, cache, size):
    texts = ranks.errors(size, augment, weights, cache)
    told = [text for text in texts if "TeacherError: sample " in text]
    assert told
    for text in told:
        assert " of texts has other inputs in epoch 1 than in epoch 0, from which " in text
        assert "a cache is for inputs that stay the same. Where they are augmented at random, or padded to" in text
        assert "remove the folder, or give another one with cache=" in text
    for text in texts:
        assert "has other inputs in epoch 1" in text, "the others are told why they wait in vain"


def learn_others(path, cache):
    """Another run, with other data."""
    with Run(global_batch=7) as run:
        teacher = run.teacher(Counted, weights=path, placement="cached", cache=cache)
        for epoch in run.shard(TensorDataset(tokens().flip(0))).epochs(1):
            for step in epoch:
                for (batch,) in step:
                    teacher(batch)


def test_inputs_of_an_earlier_run_that_were_others_are_told_with_what_to_do(ranks, weights, cache):
    ranks(1, learn, weights, cache, 1)
    (text,) = ranks.errors(1, learn_others, weights, cache)
    assert f" has other inputs in epoch 0 than in epoch 0 of the earlier run from which {cache} keeps the" in text
    assert "Where the data, its order, its tokenizer or the names of the shards have changed since, give" in text
    assert "another folder with cache=, or remove this one; where inputs are augmented at random, or padded" in text


def reopen(path, cache, build=Teacher, **options):
    with Run(global_batch=7) as run:
        run.teacher(build, weights=path, placement="cached", cache=cache, **options)


def reopen_in_half(path, cache):
    reopen(path, cache, dtype=torch.bfloat16)


def reopen_compressed(path, cache):
    reopen(path, cache, top_k=3)


def test_a_cache_of_another_teacher_is_refused_on_all_ranks(ranks, weights, cache, tmp_path):
    other = tmp_path / "other.safetensors"
    write_teacher(other, seed=4)
    ranks(1, learn, weights, cache, 1)
    for text in ranks.errors(2, reopen, other, cache):
        assert f"TeacherError: the cache {cache} keeps outputs of another teacher: its teacher is " in text
        assert "give another folder with cache=, or remove this one" in text
    assert "its dtype is None and this one's is torch.bfloat16" in ranks.errors(1, reopen_in_half, weights, cache)[0]
    assert "its top_k is None and this one's is 3" in ranks.errors(1, reopen_compressed, weights, cache)[0]
    assert "its module is Counted and this one's is Teacher" in ranks.errors(1, reopen, weights, cache)[0]


def test_a_folder_that_is_no_cache_is_refused(ranks, weights, cache):
    cache.mkdir()
    (cache / "notes.txt").write_text("mine")
    (text,) = ranks.errors(1, reopen, weights, cache)
    assert f"TeacherError: {cache} holds files and no teacher.json, so it is no cache of a teacher" in text
    (cache / "teacher.json").write_text("{")
    (text,) = ranks.errors(1, reopen, weights, cache)
    assert f"TeacherError: {cache}/teacher.json is not one of samestep (" in text
    (text,) = ranks.errors(1, reopen, weights, cache / "notes.txt")
    assert "cannot be opened: " in text
    assert "give a folder that can be written with cache=" in text


def compressed(path, cache):
    with Run(global_batch=7) as run:
        teacher = run.teacher(Teacher, weights=path, placement="cached", cache=cache, top_k=3, temperature=2.0)
        answers, losses = [], []
        for epoch in run.shard(TensorDataset(tokens())).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    answers.append(teacher(batch))
                    losses.append(distill_loss(torch.zeros(len(batch), 6, 13), answers[-1], 2.0))
        return answers, losses


def test_top_k_logits_are_kept_in_the_place_of_all(ranks, weights, cache):
    ((answers, losses),) = ranks(1, compressed, weights, cache)
    half = len(answers) // 2
    for first, second in zip(answers[:half], answers[half:], strict=True):
        assert isinstance(second, TopK)
        assert first.temperature == second.temperature == 2.0
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[:3], second[:3], strict=True))
    for first, second in zip(losses[:half], losses[half:], strict=True):
        assert torch.equal(first, second)


def evaluate(path, cache, inner):
    """The mean loss over uneven parts, twice, and the rows that were computed."""
    with Run(global_batch=8, start_timeout=30, step_timeout=30) as run:
        Counted.rows = 0
        teacher = run.teacher(Counted, weights=path, placement="cached", cache=cache, inner=inner)
        model, test = run.wrap(Student()), run.shard(TensorDataset(tokens()), micro_batch=1)
        found = []
        for _ in range(2):
            with run.evaluate(model) as net:
                found.append(run.mean(distill_loss(net(x), teacher(x)).mean(1) for (x,) in test))
        return found, Counted.rows


@pytest.mark.parametrize("inner", [None, "sharded"])
def test_an_evaluation_of_uneven_parts_is_kept_too(ranks, weights, cache, inner, tmp_path):
    (((wanted, _), _),) = ranks(1, evaluate, weights, tmp_path / "one", None)
    for (first, second), _ in ranks(3, evaluate, weights, cache, inner):
        assert first == second == pytest.approx(wanted, abs=1e-6)
    assert kept(cache) == N


class Pooled(Teacher):
    """Gives something that is not one row a sample."""

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


def test_what_cannot_be_kept_by_sample_is_refused(ranks, weights, cache):
    told = {use: ranks.errors(1, use, weights, cache / use.__name__)[0] for use in (pooled, other_rows, outside)}
    assert "the teacher gives a tensor of shape () for 7 samples, and a cache keeps one row for each" in told[pooled]
    assert "the teacher got tensors of shapes [(14, 6)] for the 7 samples of this batch" in told[other_rows]
    assert "placement='cached' keeps outputs by sample and was called where there is none: call" in told[outside]


@contextmanager
def full(cache):
    """Let the files of a cache not grow any more while this is open, nor any other file beyond their length."""
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
                    # around the call alone, in which nothing else is written: the run's own log may be longer
                    with full(cache) if number == 2 else nullcontext():
                        teacher(batch)


def test_a_cache_that_cannot_grow_says_so_and_keeps_what_it_has(ranks, weights, cache):
    (text,) = ranks.errors(1, full_disk, weights, cache)
    assert f"TeacherError: the cache {cache} cannot be written: the file would exceed the size limit: raise the" in text
    assert ", or give another folder with cache=; the rows already there stay good" in text
    assert kept(cache) == 14
    rows = ranks(1, learn, weights, cache, 1)[0][1]
    assert N - 14 <= rows <= N
    assert json.loads((cache / "teacher.json").read_text())["format"] == 3


class Named(nn.Module):
    """Outputs by name, of a mapping class."""

    def __init__(self):
        super().__init__()
        self.body = Teacher()

    def forward(self, tokens, scale=1.0):
        from collections import OrderedDict

        logits = self.body(tokens) * scale
        return OrderedDict(logits=logits, hidden=(logits.sum(-1), logits.to(torch.bfloat16)), note="a")


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
                    answers.append((type(out).__name__, out["logits"], *out["hidden"], out["note"]))
        return answers


def test_outputs_of_any_form_are_read_as_they_were_given(ranks, cache, tmp_path):
    path = tmp_path / "named.safetensors"
    write_named(path)
    (answers,) = ranks(1, named, path, cache)
    half = len(answers) // 2
    for first, second in zip(answers[:half], answers[half:], strict=True):
        assert first[0] == second[0] == "OrderedDict"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[1:4], second[1:4], strict=True))
        assert first[3].dtype == torch.bfloat16
        assert first[4] == second[4] == "a"
