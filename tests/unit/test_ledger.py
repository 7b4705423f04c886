"""The ledger's writer: records that survive a kill, are never mixed up, and cost next to nothing."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from samestep.data import ledger
from samestep.data.ledger import CAPACITY, RECORD, SIZE, Kind, LedgerWriter, ShardDescription, next_generation, sound
from samestep.errors import LedgerError

WHOLE = ShardDescription(n=100, seed=7, shuffle=True, global_batch=10)


def open_writer(
    folder: Path, rank: int = 0, size: int = 2, generation: int = 0, start=(0, 0), **changes
) -> LedgerWriter:
    description = ShardDescription(**{**WHOLE.__dict__, **changes})
    return LedgerWriter(folder, "train", description, rank=rank, size=size, generation=generation, start=start)


def read(folder: Path, rank: int = 0) -> np.ndarray:
    return np.fromfile(folder / "ledger" / "train" / f"rank-{rank:05}.bin", dtype=RECORD)


def test_records_are_read_back_as_they_were_added(tmp_path):
    writer = open_writer(tmp_path, rank=1, generation=3, start=(2, 5))
    writer.add(epoch=2, step=5, first=55, count=5)
    writer.add(epoch=2, step=5, first=55, count=1, weight=0.0)
    writer.add(epoch=3, step=2**35, first=2**60, count=2**32 - 1)
    writer.evaluated(number=4, batch=1, first=30, count=10)
    writer.passed(number=4)
    writer.close()
    records = read(tmp_path, rank=1)
    assert sound(records).all()
    assert set(records["generation"]) == {3}
    assert set(records["rank"]) == {1}
    told = [
        (Kind(r["kind"]).name, *map(int, (r["epoch"], r["step"], r["first"], r["count"])), r["weight"])
        for r in records[1:]
    ]
    assert told == [
        ("TRAINED", 2, 5, 55, 5, 1.0),
        ("TRAINED", 2, 5, 55, 1, 0.0),
        ("TRAINED", 3, 2**35, 2**60, 2**32 - 1, 1.0),
        ("EVALUATED", 4, 1, 30, 10, 1.0),
        ("PASSED", 4, 0, 0, 0, 1.0),
        ("END", 3, 2**35 + 1, 0, 0, 1.0),
    ]
    start = records[0]
    assert (start["kind"], start["epoch"], start["step"], start["count"]) == (Kind.START, 2, 5, 2)


def test_a_start_is_written_at_once_and_the_rest_together(tmp_path):
    writer = open_writer(tmp_path)
    assert len(read(tmp_path)) == 1
    for step in range(5):
        writer.add(0, step, 10 * step, 5)
    assert len(read(tmp_path)) == 1
    writer.flush()
    assert len(read(tmp_path)) == 6
    writer.close()


def test_a_full_buffer_and_the_end_of_an_epoch_are_written_by_themselves(tmp_path):
    writer = open_writer(tmp_path)
    for step in range(CAPACITY + 1):
        writer.add(0, step, 10 * step, 5)
    assert len(read(tmp_path)) == 1 + CAPACITY
    writer.add(1, 0, 0, 5)
    assert len(read(tmp_path)) == 1 + CAPACITY + 1
    for number in range(CAPACITY + 1):
        writer.evaluated(number, 0, 0, 100)
    writer.close()
    records = read(tmp_path)
    assert sound(records).all()
    assert len(records) == 1 + (CAPACITY + 1) + 1 + (CAPACITY + 1) + 1


def test_the_end_says_how_far_the_rank_came_and_whether_all_went_well(tmp_path):
    writer = open_writer(tmp_path, start=(1, 3))
    writer.close(failed=True)
    writer.close()
    end = read(tmp_path)[-1]
    assert (end["kind"], end["epoch"], end["step"], end["weight"]) == (Kind.END, 1, 3, 0.0)


def test_each_start_appends_and_gets_a_number_of_its_own(tmp_path):
    assert next_generation(tmp_path, "train") == 0
    for generation in range(3):
        for rank in range(3 - generation):
            open_writer(tmp_path, rank, size=3 - generation, generation=generation).close()
        assert next_generation(tmp_path, "train") == generation + 1
    assert read(tmp_path, rank=0)["generation"].tolist() == [0, 0, 1, 1, 2, 2]
    assert read(tmp_path, rank=2)["generation"].tolist() == [0, 0]


@pytest.mark.parametrize("left", [b"x" * 17, b"\0" * SIZE * 3, b"\0" * SIZE * (CAPACITY + 1) + b"y"])
def test_what_a_kill_left_half_written_is_cut_before_more_is_appended(tmp_path, left):
    writer = open_writer(tmp_path, generation=5)
    writer.add(0, 0, 0, 5)
    writer.close()
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    with path.open("ab") as file:
        file.write(left)
    assert next_generation(tmp_path, "train") == 6
    open_writer(tmp_path, generation=6).close()
    records = read(tmp_path)
    assert path.stat().st_size == len(records) * SIZE
    assert sound(records).all()
    assert records["generation"].tolist() == [5, 5, 5, 6, 6]


def test_a_file_without_one_sound_record_begins_anew(tmp_path):
    open_writer(tmp_path).close()
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    path.write_bytes(b"\xff" * 100)
    assert next_generation(tmp_path, "train") == 0
    open_writer(tmp_path).close()
    assert sound(read(tmp_path)).tolist() == [True, True]


def test_a_change_of_any_byte_is_noticed(tmp_path):
    writer = open_writer(tmp_path)
    writer.add(3, 12, 345, 67)
    writer.close()
    whole = read(tmp_path)[1:2].tobytes()
    for place in range(SIZE):
        for change in (1, 128, 255):
            changed = bytearray(whole)
            changed[place] ^= change
            assert not sound(np.frombuffer(changed, dtype=RECORD)).any()


def test_the_description_is_written_once_and_must_stay_the_same(tmp_path):
    open_writer(tmp_path, rank=1).close()
    path = tmp_path / "ledger" / "train" / "shard.json"
    assert not path.exists()
    open_writer(tmp_path).close()
    assert json.loads(path.read_text()) == {
        "version": 1,
        "n": 100,
        "seed": 7,
        "shuffle": True,
        "global_batch": 10,
        "weighted": False,
        "drop_last": False,
    }
    assert [found.name for found in path.parent.iterdir() if found.suffix == ".part"] == []
    open_writer(tmp_path, generation=1).close()
    with pytest.raises(
        LedgerError, match="is of other data: n was 100 and is 90, seed was 7 and is 8; use a new folder"
    ):
        open_writer(tmp_path, n=90, seed=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not describe a shard"),
        ("[]", "does not describe a shard"),
        ('{"n": 3}', "does not describe a shard"),
        ('{"version": 1, "n": 3}', "does not describe a shard"),
        ('{"version": 2}', "is of version 2 and this samestep reads version 1: update it"),
    ],
)
def test_a_description_that_cannot_be_read_is_an_error(tmp_path, text, message):
    path = tmp_path / "ledger" / "train" / "shard.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(LedgerError, match=message):
        open_writer(tmp_path)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "a'; echo foo"])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(LedgerError, match="cannot be a folder: use letters, digits, '-', '_' and "):
        next_generation(tmp_path, name)


@pytest.mark.parametrize(
    ("rank", "size", "generation", "message"),
    [
        (2, 2, 0, "rank 2 in a world of 2: a ledger keeps ranks 0 to 65535, below the world size"),
        (-1, 2, 0, "rank -1 in a world of 2"),
        (0, 2**16 + 1, 0, "rank 0 in a world of 65537"),
        (0, 1, 2**16, "generation 65536 cannot be written: a ledger keeps 65536 starts; use a new folder"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path, rank, size, generation, message):
    with pytest.raises(LedgerError, match=message):
        open_writer(tmp_path, rank, size, generation)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_does_not_flush_is_told_with_what_to_do(tmp_path, monkeypatch):
    writer = open_writer(tmp_path)
    writer.add(0, 0, 0, 5)
    monkeypatch.setattr(os, "fsync", no_space)
    told = r"rank-00000\.bin cannot be written: the disk is full: free some space, or run with ledger=False"
    with pytest.raises(LedgerError, match=told):
        writer.sync()
    with pytest.raises(LedgerError, match=told):
        writer.close()


def test_a_write_that_takes_only_a_part_is_continued(tmp_path, monkeypatch):
    writer, write = open_writer(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    writer.add(0, 0, 0, 5)
    writer.close()
    assert sound(read(tmp_path)).tolist() == [True] * 3


def test_a_closed_ledger_takes_no_more(tmp_path):
    writer = open_writer(tmp_path)
    writer.close()
    writer.add(0, 0, 0, 5)
    with pytest.raises(LedgerError, match=r"rank-00000\.bin is closed: no record can be added"):
        writer.flush()


def test_the_layout_in_python_and_in_numpy_is_one():
    values = (2, 0, 3, 4, 5, 6, 7, 0.5, 8)
    record = np.frombuffer(ledger._STRUCT.pack(*values), dtype=RECORD)[0]
    assert tuple(record) == values
