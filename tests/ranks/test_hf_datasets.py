"""Hugging Face datasets: every record exactly once, on any number of ranks and over a restart inside of an epoch."""

import json
import os

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.data.audit import audit

pytestmark = pytest.mark.slow

FILES, RECORDS = 4, 15  # records per file
EPOCHS = 2


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Records with a number and a vector, as JSON lines and as Parquet, in files of one length."""
    from datasets import Dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for part in range(FILES):
        rows = [{"id": at, "x": [float(at), 1.0]} for at in range(part * RECORDS, (part + 1) * RECORDS)]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Dataset.from_list(rows).to_parquet(tmp_path / f"{part}.parquet")
    return tmp_path


class Shards:
    """The files of a stream, for ranks that read only their own; as on the page about Hugging Face."""

    def __init__(self, dataset):
        self.dataset, self.num_shards = dataset, dataset.num_shards

    def __iter__(self):
        return iter(self.dataset)

    def shard(self, index):
        return self.dataset.shard(self.num_shards, index)


def load(folder, kind):
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    suffix = "parquet" if kind == "parquet" else "jsonl"
    paths = [str(folder / f"{part}.{suffix}") for part in range(FILES)]
    name, streaming = "parquet" if suffix == "parquet" else "json", kind not in ("map", "torch")
    cache = str(folder / f"cache-{os.getpid()}")
    dataset = load_dataset(name, data_files=paths, split="train", streaming=streaming, cache_dir=cache)
    if kind in ("torch", "parquet"):
        return dataset.with_format("torch")
    if kind == "shuffled":
        return dataset.shuffle(seed=3, buffer_size=16)
    if kind == "mapped":
        return dataset.map(lambda row: {"x": [2 * each for each in row["x"]]}).filter(lambda row: row["id"] % 5 < 4)
    return Shards(dataset) if kind == "shards" else dataset


class Interrupted(Exception):
    pass


def train(files, folder, kind, stop=None, workers=0):
    """Resume and train two epochs; return the numbers of the records of each step, or stop inside of step `stop`."""
    seen = []
    with Run(global_batch=8, seed=0, folder=folder, ledger=kind != "shards") as run:
        model = run.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        dataset = load(files, kind)
        read = run.shard if kind in ("map", "torch") else run.stream
        options = {"shuffle": True} if kind in ("map", "torch") else {}
        data = read(dataset, num_workers=workers, **options)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, train=data)
        for epoch in data.epochs(EPOCHS):
            for step in epoch:
                ids = []
                for batch in step:
                    x = batch["x"] if torch.is_tensor(batch["x"]) else torch.stack(batch["x"], dim=1)
                    step.mean(model(x.float()).sum(1)).backward()
                    ids += batch["id"][step.weights > 0].tolist()
                if step.number == stop:
                    raise Interrupted
                optimizer.step()
                optimizer.zero_grad()
                seen.append((epoch.number, ids))
                checkpoint.save()
    return seen


def by_step(answers):
    """The numbers of each step over all ranks, sorted."""
    return [(steps[0][0], sorted(number for _, ids in steps for number in ids)) for steps in zip(*answers, strict=True)]


@pytest.mark.parametrize("kind", ["map", "torch", "json", "parquet", "shuffled", "mapped", "shards"])
def test_every_record_counts_once_over_a_restart_on_another_number_of_ranks(ranks, files, tmp_path, kind):
    expected = by_step(ranks(1, train, files, tmp_path / "one", kind))
    for text in ranks.errors(3, train, files, tmp_path / "two", kind, 3):
        assert "Interrupted" in text
    resumed = by_step(ranks(2, train, files, tmp_path / "two", kind))
    assert resumed == expected[3:]  # inside of the first epoch
    known = [number for number in range(FILES * RECORDS) if kind != "mapped" or number % 5 < 4]
    for epoch in range(EPOCHS):
        assert sorted(number for at, ids in expected for number in ids if at == epoch) == known
    if kind != "shards":
        report = audit(tmp_path / "two")
        assert report.exactly_once
        assert [epoch.samples for shard in report.shards for epoch in shard.epochs] == [len(known)] * EPOCHS


@pytest.mark.parametrize("kind", ["torch", "json"])
def test_data_workers_read_the_same_records(ranks, files, tmp_path, kind):
    expected = by_step(ranks(1, train, files, tmp_path / "one", kind))
    assert by_step(ranks(2, train, files, tmp_path / "two", kind, None, 2)) == expected


def test_a_stream_that_has_resumed_starts_from_its_beginning_in_another_run(files, tmp_path):
    dataset = load(files, "json")

    def read(folder, stop):
        with Run(global_batch=20, folder=tmp_path / "logs") as run:
            stream = run.stream(dataset)
            checkpoint = run.checkpoint(tmp_path / folder, model=nn.Linear(1, 1), train=stream)
            ids = []
            for epoch in stream.epochs(1):
                for step in epoch:
                    ids += [number for batch in step for number in batch["id"].tolist()]
                    checkpoint.save()
                    if len(ids) == stop:
                        return ids
            return ids

    assert read("first", 20) + read("first", None) == list(range(60))
    assert read("second", None) == list(range(60))
