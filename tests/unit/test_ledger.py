"""The ledger's records survive a kill and are never mixed up."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from samestep.data import ledger as ledger_module
from samestep.data.audit import audit
from samestep.data.ledger import (
    BUFFER_RECORDS,
    RECORD,
    RECORD_BYTES,
    RecordKind,
    ShardDescription,
    ShardLedger,
    next_generation,
    valid_mask,
)
from samestep.data.ledger_reader import read_ledger
from samestep.errors import LedgerError

DESCRIPTION = ShardDescription(n=100, seed=7, shuffle=True, global_batch=10)


def open_ledger(
    folder: Path, rank: int = 0, world_size: int = 2, generation: int = 0, start=(0, 0), **changes
) -> ShardLedger:
    description = ShardDescription(**{**DESCRIPTION.__dict__, **changes})
    ledger = ShardLedger(folder, "train", description, rank, world_size, generation)
    ledger.begin(*start)
    return ledger


def read_all(folder: Path, rank: int = 0) -> np.ndarray:
    return np.fromfile(folder / "ledger" / "train" / f"rank-{rank:05}.bin", dtype=RECORD)


def read(folder: Path, rank: int = 0) -> np.ndarray:
    """Return the records that are not running hashes."""
    records = read_all(folder, rank)
    return records[records["kind"] != RecordKind.CHECK]


def test_records_are_read_back_as_they_were_added(tmp_path):
    ledger = open_ledger(tmp_path, rank=1, generation=3, start=(2, 5))
    ledger.record_training(epoch=2, step=5, first=55, count=5)
    ledger.record_training(epoch=2, step=5, first=55, count=1, weight=0.0)
    ledger.record_training(epoch=3, step=2**35, first=2**60, count=2**32 - 1)
    ledger.record_evaluation(number=4, batch=1, first=30, count=10)
    ledger.end_evaluation(number=4)
    ledger.close()
    records = read(tmp_path, rank=1)
    assert valid_mask(records).all()
    assert set(records["generation"]) == {3}
    assert set(records["rank"]) == {1}
    fields = [
        (RecordKind(r["kind"]).name, *map(int, (r["epoch"], r["step"], r["first"], r["count"])), r["weight"])
        for r in records[1:]
    ]
    assert fields == [
        ("TRAINED", 2, 5, 55, 5, 1.0),
        ("TRAINED", 2, 5, 55, 1, 0.0),
        ("TRAINED", 3, 2**35, 2**60, 2**32 - 1, 1.0),
        ("EVALUATED", 4, 1, 30, 10, 1.0),
        ("EVALUATION_END", 4, 0, 0, 0, 1.0),
        ("END", 3, 2**35 + 1, 5 + 2**32 - 1, 0, 1.0),
    ]
    start = records[0]
    assert (start["kind"], start["epoch"], start["step"], start["count"]) == (RecordKind.START, 2, 5, 2)


def test_the_file_is_opened_by_the_first_begin_only(tmp_path):
    ledger = ShardLedger(tmp_path, "train", DESCRIPTION, rank=0, world_size=1, generation=0)
    ledger.flush()
    ledger.sync()
    ledger.close()
    assert list(tmp_path.iterdir()) == []
    assert [ledger.begin_evaluation(0, 4), ledger.begin_evaluation(0, 6)] == [0, 1]
    ledger.begin(1, 0)
    ledger.close()
    ledger.begin(2, 0)
    assert read(tmp_path)["kind"].tolist() == [RecordKind.START, RecordKind.END]
    assert read(tmp_path)["step"].tolist() == [4, 4]


def test_the_start_record_is_written_at_once_and_the_others_together(tmp_path):
    ledger = open_ledger(tmp_path)
    assert len(read(tmp_path)) == 1
    for step in range(5):
        ledger.record_training(0, step, 10 * step, 5)
    assert len(read(tmp_path)) == 1
    ledger.flush()
    assert len(read(tmp_path)) == 6
    ledger.close()


def test_a_full_buffer_and_the_end_of_an_epoch_are_written_without_a_flush(tmp_path):
    ledger = open_ledger(tmp_path)
    for step in range(BUFFER_RECORDS + 1):
        ledger.record_training(0, step, 10 * step, 5)
    assert len(read(tmp_path)) == 1 + BUFFER_RECORDS
    ledger.record_training(1, 0, 0, 5)
    assert len(read(tmp_path)) == 1 + BUFFER_RECORDS + 1
    for number in range(BUFFER_RECORDS + 1):
        ledger.record_evaluation(number, 0, 0, 100)
    ledger.close()
    records = read(tmp_path)
    assert valid_mask(records).all()
    assert len(records) == 1 + (BUFFER_RECORDS + 1) + 1 + (BUFFER_RECORDS + 1) + 1


def test_the_end_record_has_the_position_and_whether_the_run_succeeded(tmp_path):
    ledger = open_ledger(tmp_path, start=(1, 3))
    ledger.close(failed=True)
    ledger.close()
    end = read(tmp_path)[-1]
    assert (end["kind"], end["epoch"], end["step"], end["weight"]) == (RecordKind.END, 1, 3, 0.0)


def test_each_start_of_a_run_appends_with_the_next_generation(tmp_path):
    assert next_generation(tmp_path, "train") == 0
    for generation in range(3):
        for rank in range(3 - generation):
            open_ledger(tmp_path, rank, world_size=3 - generation, generation=generation).close()
        assert next_generation(tmp_path, "train") == generation + 1
    assert read(tmp_path, rank=0)["generation"].tolist() == [0, 0, 1, 1, 2, 2]
    assert read(tmp_path, rank=2)["generation"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "left", [b"x" * 17, b"\0" * RECORD_BYTES * 3, b"\0" * RECORD_BYTES * (BUFFER_RECORDS + 1) + b"y"]
)
def test_a_record_that_a_kill_left_half_written_is_removed_before_more_is_appended(tmp_path, left):
    ledger = open_ledger(tmp_path, generation=5)
    ledger.record_training(0, 0, 0, 5)
    ledger.close()
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    with path.open("ab") as file:
        file.write(left)
    assert next_generation(tmp_path, "train") == 6
    open_ledger(tmp_path, generation=6).close()
    records = read(tmp_path)
    assert path.stat().st_size == len(read_all(tmp_path)) * RECORD_BYTES
    assert valid_mask(read_all(tmp_path)).all()
    assert read_ledger(path.parent).faults == ()
    assert records["generation"].tolist() == [5, 5, 5, 6, 6]


def test_a_file_without_a_valid_record_is_overwritten(tmp_path):
    open_ledger(tmp_path).close()
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    path.write_bytes(b"\xff" * 100)
    assert next_generation(tmp_path, "train") == 0
    open_ledger(tmp_path).close()
    assert valid_mask(read(tmp_path)).tolist() == [True, True]


def test_a_change_of_any_byte_makes_a_record_invalid(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.record_training(3, 12, 345, 67)
    ledger.close()
    record = read(tmp_path)[1:2].tobytes()
    for byte in range(RECORD_BYTES):
        for change in (1, 128, 255):
            changed = bytearray(record)
            changed[byte] ^= change
            assert not valid_mask(np.frombuffer(changed, dtype=RECORD)).any()


def test_the_description_is_written_once_and_must_stay_the_same(tmp_path):
    open_ledger(tmp_path, rank=1).close()
    path = tmp_path / "ledger" / "train" / "shard.json"
    assert not path.exists()
    open_ledger(tmp_path).close()
    assert json.loads(path.read_text()) == {
        "version": 3,
        "starts": 1,
        "n": 100,
        "seed": 7,
        "shuffle": True,
        "global_batch": 10,
        "weighted": False,
        "drop_last": False,
    }
    assert [found.name for found in path.parent.iterdir() if found.suffix == ".part"] == []
    open_ledger(tmp_path, generation=1).close()
    with pytest.raises(
        LedgerError, match="describes other data: n was 100 and is now 90, seed was 7 and is now 8; use a new folder"
    ):
        open_ledger(tmp_path, n=90, seed=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not describe a shard"),
        ("[]", "does not describe a shard"),
        ('{"n": 3}', "does not describe a shard"),
        ('{"version": 1, "n": 3}', "does not describe a shard"),
        ('{"version": 4}', "has version 4, and this samestep reads version 3: update samestep"),
    ],
)
def test_a_description_that_cannot_be_read_is_an_error(tmp_path, text, message):
    path = tmp_path / "ledger" / "train" / "shard.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(LedgerError, match=message):
        open_ledger(tmp_path)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "a'; echo foo"])
def test_a_shard_name_that_cannot_be_a_folder_name_is_an_error(tmp_path, name):
    with pytest.raises(LedgerError, match="cannot be a folder name: use letters, digits, '-', '_' and "):
        next_generation(tmp_path, name)


@pytest.mark.parametrize(
    ("rank", "world_size", "generation", "message"),
    [
        (2, 2, 0, "rank 2 in a world of 2 cannot be recorded: a rank must be below the world size and below 65536"),
        (-1, 2, 0, "rank -1 in a world of 2"),
        (0, 2**16 + 1, 0, "rank 0 in a world of 65537"),
        (0, 1, 2**16, "generation 65536 cannot be recorded: a ledger supports 65536 starts of a run; use a new folder"),
    ],
)
def test_a_rank_or_generation_that_does_not_fit_is_an_error(tmp_path, rank, world_size, generation, message):
    with pytest.raises(LedgerError, match=message):
        open_ledger(tmp_path, rank, world_size, generation)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_fsync_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    ledger = open_ledger(tmp_path)
    ledger.record_training(0, 0, 0, 5)
    monkeypatch.setattr(os, "fsync", no_space)
    message = r"rank-00000\.bin cannot be written: the disk is full: free some space, or run with ledger=False"
    with pytest.raises(LedgerError, match=message):
        ledger.sync()
    with pytest.raises(LedgerError, match=message):
        ledger.close()


def test_a_partial_write_is_continued(tmp_path, monkeypatch):
    ledger, write = open_ledger(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    ledger.record_training(0, 0, 0, 5)
    ledger.close()
    assert valid_mask(read(tmp_path)).tolist() == [True] * 3


def test_a_closed_ledger_accepts_no_more_records(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.close()
    ledger.record_training(0, 0, 0, 5)
    with pytest.raises(LedgerError, match=r"rank-00000\.bin is closed: no more records can be added"):
        ledger.flush()


def test_the_record_layout_is_the_same_in_struct_and_in_numpy():
    values = (2, 0, 3, 4, 5, 6, 7, 0.5, 8)
    record = np.frombuffer(ledger_module._STRUCT.pack(*values), dtype=RECORD)[0]
    assert tuple(record) == values


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_ledger_is_read_and_continued_with_running_hashes(tmp_path, version):
    ledger = open_ledger(tmp_path, world_size=1)
    ledger.record_training(0, 0, 0, 10)
    ledger.close()
    path = tmp_path / "ledger" / "train" / "shard.json"
    fields = {name: value for name, value in json.loads(path.read_text()).items() if name != "starts"}
    path.write_text(json.dumps({**fields, "version": version}))
    records = read(tmp_path)
    records["weight"][0], records["first"][-1] = 1, 0  # as older versions wrote them
    records["checksum"] = ledger_module.checksums(records)
    records.tofile(path.parent / "rank-00000.bin")
    assert read_ledger(path.parent).description.n == 100
    report = audit(tmp_path)
    assert report.verdict == "sound"
    assert "an older samestep wrote it, without running hashes: changed records" in report.shards[0].notes[0]
    open_ledger(tmp_path, world_size=1, generation=1, start=(0, 1)).close()
    assert json.loads(path.read_text())["version"] == 3
    assert audit(tmp_path).verdict == "sound"
    changed = read_all(tmp_path)
    changed["count"][1] -= 1  # of the older version: the first running hash covers it
    changed["checksum"] = ledger_module.checksums(changed)
    changed.tofile(path.parent / "rank-00000.bin")
    assert audit(tmp_path).verdict == "faulty"


def test_weights_above_zero_are_found_by_their_bits():
    weights = [0.0, -0.0, 1.0, 0.5, 6e-8, 65504.0, np.inf, -1.0, -np.inf, np.nan, -np.nan]
    records = np.zeros(len(weights), dtype=RECORD)
    records["weight"] = weights
    assert ledger_module.has_weight(records).tolist() == (records["weight"] > 0).tolist()


def test_every_write_ends_with_the_running_hash_of_the_file(tmp_path):
    ledger = open_ledger(tmp_path, world_size=1)
    for step in range(3):
        ledger.record_training(0, step, 10 * step, 10)
    ledger.flush()
    assert read_all(tmp_path)["kind"].tolist() == [1, 8, 2, 2, 2, 8]
    check = read_all(tmp_path)[-1]
    assert (check["epoch"], check["step"], check["count"]) == (0, 3, 5)
    ledger.flush()
    assert len(read_all(tmp_path)) == 6  # nothing was added
    ledger.close()
    state = ledger.state()
    assert (state.records, state.epoch, state.step, state.generation) == (8, 0, 3, 0)
    assert read_ledger(tmp_path / "ledger" / "train").files[0].hashes[8] == state.hash
    again = ShardLedger(tmp_path, "train", DESCRIPTION, 0, 1, 1)
    assert again.state() is None
    again.begin(0, 3)
    assert (again.state().records, again.state().began) == (10, state.began)
    again.close()
    assert read_ledger(tmp_path / "ledger" / "train").faults == ()


def test_what_a_killed_process_wrote_without_a_running_hash_is_part_of_the_next_one(tmp_path):
    ledger = open_ledger(tmp_path, world_size=1)
    for step in range(3):
        ledger.record_training(0, step, 10 * step, 10)
    ledger.flush()
    os.close(ledger._file)
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    os.truncate(path, 4 * RECORD_BYTES + 7)  # the write was cut off in the third record of three
    open_ledger(tmp_path, world_size=1, generation=1, start=(0, 2)).close()
    assert audit(tmp_path).verdict == "sound"
    records = read_all(tmp_path)
    records["count"][2] -= 1
    records["checksum"] = ledger_module.checksums(records)
    records.tofile(path)
    (fault, *_) = read_ledger(path.parent).faults
    assert (
        fault.text == "rank-00000.bin: records 2 to 4 were changed after they were written (the running hash differs)"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 10**30}, "n is 1000000000000000000000000000000, and must be an integer from 1 to 4611686018427387904"),
        ({"n": -5}, "n is -5, and must be"),
        ({"n": 0}, "n is 0, and must be"),
        ({"n": 100.0}, "n is 100.0, and must be"),
        ({"n": "100"}, "n is 100, and must be"),
        ({"n": True}, "n is True, and must be"),
        ({"n": float("inf")}, "n is inf, and must be"),
        ({"global_batch": 0}, "global_batch is 0, and must be an integer from 1"),
        ({"global_batch": None}, "global_batch is None, and must be"),
        ({"seed": 1 << 70}, "seed is 1180591620717411303424, and must be"),
        ({"seed": "x" * 100}, "seed is " + "x" * 40 + ", and must be"),
        ({"starts": -1}, "starts is -1, and must be an integer from 0 to 65536"),
        ({"shuffle": 1}, "shuffle is 1, and must be true or false"),
        ({"drop_last": None}, "drop_last is None, and must be true or false"),
        ({"other": 1}, "unexpected keyword argument 'other'"),
    ],
)
def test_a_description_with_absurd_values_is_an_error(tmp_path, change, message):
    open_ledger(tmp_path).close()
    path = tmp_path / "ledger" / "train" / "shard.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(LedgerError, match=re.escape(message)):
        audit(tmp_path)


def test_a_description_that_is_nested_too_deeply_is_an_error(tmp_path):
    open_ledger(tmp_path).close()
    (tmp_path / "ledger" / "train" / "shard.json").write_text("[" * 100_000)
    with pytest.raises(LedgerError, match="does not describe a shard"):
        audit(tmp_path)


def test_files_that_cannot_be_read_are_errors(tmp_path):
    open_ledger(tmp_path).close()
    path = tmp_path / "ledger" / "train" / "rank-00000.bin"
    path.unlink()
    path.mkdir()
    with pytest.raises(LedgerError, match=r"rank-00000\.bin cannot be read: it is not a regular file; check the path"):
        audit(tmp_path)
    path.rmdir()
    description = path.with_name("shard.json")
    description.unlink()
    description.mkdir()
    with pytest.raises(LedgerError, match=r"shard\.json cannot be read: it is not a regular file; check the path"):
        audit(tmp_path)
