"""Full and read-only disks: records wait in memory, one warning is given, and writing resumes."""

import errno
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from samestep import disk as disk_module
from samestep.checkpoint import folder_lock
from samestep.data.ledger import RECORD, RecordKind, ShardDescription, ShardLedger, rank_file, shard_folder, valid_mask
from samestep.data.ledger_reader import read_ledger
from samestep.disk import AppendFile, describe_os_error
from samestep.errors import LedgerError
from samestep.loggers.console import open_console
from samestep.loggers.loggers import Loggers, LogRow
from samestep.loggers.run_files import JsonlLogger, open_tensorboard, read_metrics
from samestep.messages import SamestepWarning
from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 128) as disk:
        yield disk


@pytest.fixture
def retry_immediately(monkeypatch):
    """Retry a failed write with the next record, not seconds later."""
    monkeypatch.setattr(disk_module, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "the disk is full: free some space"),
        (errno.EDQUOT, "the disk quota is exceeded: free some space"),
        (errno.EROFS, "the disk is read-only: choose another folder"),
        (errno.EACCES, "permission denied: choose a folder that you can write to, or change its permissions"),
        (errno.EFBIG, "the file would exceed the size limit: raise the limit (ulimit -f)"),
        (errno.ETIMEDOUT, "as the system says"),
    ],
)
def test_os_errors_are_described_with_a_cause_and_a_remedy(number, text):
    assert describe_os_error(OSError(number, "as the system says")) == text


# Log files


def test_records_wait_for_free_space_and_none_is_lost_or_cut_off(disk, retry_immediately):
    warned, reported = [], []
    path = disk.path / "metrics.jsonl"
    file = JsonlLogger(path, lambda: 1.0, warned.append, reported.append)
    file.write(0, {"train/loss": 0.5})
    disk.fill()
    for step in range(1, 400):  # more than what is free in the last page
        file.write(step, {"train/loss": 0.5})
    assert warned == [
        f"{path} cannot be written: the disk is full: free some space; training continues, and samestep tries "
        "again every 0 s"
    ]
    assert all(line.endswith("}") for line in path.read_text().splitlines())  # no partial record
    assert len(read_metrics(path)) < 400
    disk.make_space()
    file.write(400, {"train/loss": 0.5})
    assert reported == [f"{path} can be written again; no record is missing"]
    file.close({})
    assert [record["step"] for record in read_metrics(path)] == list(range(401))
    assert len(warned) == 1


def test_a_failed_write_is_retried_only_after_a_while(disk):
    reported = []
    file = AppendFile(disk.path / "log.txt", lambda _: None, reported.append)
    disk.fill()
    block = b"x" * 8191 + b"\n"
    file.append(block)
    disk.make_space()
    file.append(block)
    assert not reported  # ten seconds have not passed
    file.close()  # tries once more
    assert reported
    assert (disk.path / "log.txt").read_bytes() == block * 2


def test_a_full_buffer_drops_and_counts_its_oldest_records(disk, retry_immediately, monkeypatch):
    monkeypatch.setattr(disk_module, "_BUFFER_BYTES", 10 * 4000)
    reported = []
    file = AppendFile(disk.path / "log.txt", lambda _: None, reported.append)
    disk.fill()
    for number in range(16):
        file.append(f"{number:03999}\n".encode())
    disk.make_space()
    file.append(f"{16:03999}\n".encode())
    file.close()
    assert reported == [f"{disk.path / 'log.txt'} can be written again; 7 earlier record(s) are missing"]
    assert [int(line) for line in (disk.path / "log.txt").read_text().split()] == list(range(7, 17))


def test_records_that_a_full_disk_refuses_at_the_end_are_counted_in_a_warning(disk):
    warned = []
    file = AppendFile(disk.path / "log.txt", warned.append)
    file.append(b"first\n")
    disk.fill()
    for _ in range(3):
        file.append(b"x" * 8191 + b"\n")
    file.close()
    file.close()
    assert warned[1:] == [f"{disk.path / 'log.txt'} lacks its last 3 record(s): the disk is full: free some space"]
    assert (disk.path / "log.txt").read_text() == "first\n"


def test_tensorboard_curves_are_complete_after_the_disk_was_full(disk, retry_immediately, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("samestep.loggers.run_files._FLUSH_SECONDS", 0.0)
    warned = []
    logger = open_tensorboard(disk.path, warned.append)
    logger.write(0, {"train/loss": 1.0})
    disk.fill()
    for step in range(1, 200):
        logger.write(step, {"train/loss": 1.0})
    disk.make_space()
    logger.write(200, {"train/loss": 1.0})
    logger.close({})
    read = EventAccumulator(str(disk.path), size_guidance={"scalars": 0})
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == list(range(201))
    assert len(warned) == 1


def test_a_log_folder_that_cannot_be_created_only_costs_the_files(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    warned = []
    loggers = Loggers(open_console(sys.stdout), lambda: tmp_path / "taken" / "run", warned.append)
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    loggers.print("hello")
    loggers.close({"steps": 1})
    assert "hello" in capsys.readouterr().out
    assert all("a file is where a folder is needed: choose another folder" in text for text in warned)
    named = {Path(text.split(" ")[0]).name.split(".")[0] for text in warned}
    assert named == {"log", "metrics", "events", "summary"}


def test_a_read_only_disk_only_costs_the_files_until_it_is_writable(disk, retry_immediately, capsys):
    warned = []
    disk.freeze(True)
    loggers = Loggers(open_console(sys.stdout), lambda: disk.path / "run", warned.append)
    loggers.write({(LogRow(1, 1, 0), "train/loss"): 0.5})
    loggers.write({(LogRow(2, 2, 0), "train/loss"): 0.5})
    warning = "metrics.jsonl cannot be written: the disk is read-only: choose another folder"
    assert sum(warning in text for text in warned) == 1
    disk.freeze(False)
    loggers.write({(LogRow(3, 3, 0), "train/loss"): 0.5})
    loggers.close({"steps": 3})
    assert [record["step"] for record in read_metrics(disk.path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((disk.path / "run" / "summary.json").read_text()) == {"steps": 3}
    assert "metrics.jsonl can be written again; no record is missing" in capsys.readouterr().out
    assert "metrics.jsonl can be written again" in (disk.path / "run" / "log.txt").read_text()


def test_a_console_on_a_full_disk_does_not_raise():
    stream = Path("/dev/full").open("w")  # noqa: SIM115
    console = open_console(stream)
    with pytest.warns(
        SamestepWarning, match="^standard output cannot be written: the disk is full: free some space; tr"
    ):
        console.print("hello")
    console.print("again")
    stream.close()  # does not raise, since nothing is left in its buffer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "a pipe is where a file is needed: remove it"),
        (Path.mkdir, "a folder is where a file is needed: choose another folder"),
        (lambda path: path.symlink_to(path.name), "a symbolic link leads to itself: remove it"),
    ],
)
def test_a_log_file_that_is_something_else_is_reported_and_never_blocks(make, reason, tmp_path):
    make(tmp_path / "log")
    warnings: list[str] = []
    file = AppendFile(tmp_path / "log", warnings.append)
    for _ in range(3):
        file.append(b"x" * 100_000)  # more than a pipe holds
    file.close()
    assert warnings[0].startswith(f"{tmp_path}/log cannot be written: {reason}; training continues")
    assert warnings[1:] == [f"{tmp_path}/log lacks its last 3 record(s): {reason}"]


# The lock


def test_a_lock_file_that_cannot_be_written_is_removed(disk):
    disk.fill()
    assert folder_lock.acquire(disk.path) is None
    assert not (disk.path / "run.lock").exists()


# The ledger

WHOLE = ShardDescription(n=4000, seed=0, shuffle=True, global_batch=2)


def records(folder):
    return np.fromfile(rank_file(shard_folder(folder, "train"), 0), dtype=RECORD)


def open_ledger(folder):
    ledger = ShardLedger(folder, "train", WHOLE, rank=0, world_size=1, generation=0)
    ledger.begin(0, 0)
    return ledger


def add(ledger, steps):
    for step in steps:
        ledger.record_training(0, step, 2 * step, 2)


def test_a_ledger_waits_for_room_with_one_warning_and_loses_nothing(disk):
    ledger = open_ledger(disk.path)
    add(ledger, range(10))
    ledger.sync()
    disk.fill()
    with warnings.catch_warnings(record=True, category=SamestepWarning) as given:
        warnings.simplefilter("always")
        for first in range(10, 1000, 10):
            add(ledger, range(first, first + 10))
            ledger.flush()
    path = rank_file(shard_folder(disk.path, "train"), 0)
    assert [str(each.message) for each in given] == [
        f"the ledger {path} cannot be written: the disk is full: free some space; training continues, the "
        "records stay in memory, and no checkpoint is saved before they are on disk"
    ]
    with pytest.raises(LedgerError, match="the disk is full: free some space, or run with ledger=False"):
        ledger.sync()
    disk.make_space()
    ledger.sync()
    ledger.close()
    written = records(disk.path)
    assert valid_mask(written).all()
    assert written["step"][written["kind"] == RecordKind.TRAINED].tolist() == list(range(1000))
    assert read_ledger(shard_folder(disk.path, "train")).faults == ()


def test_a_ledger_that_is_not_whole_at_the_end_is_an_error_of_a_run_that_went_well_alone(disk):
    ledger = open_ledger(disk.path)
    disk.fill()
    add(ledger, range(2000))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        ledger.close(failed=True)  # its own error is to be seen, not this one
    assert "cannot be written: the disk is full: free some space, or run with ledger=False" in str(given[-1].message)
    disk.make_space()
    (disk.path / "second").mkdir()
    other = open_ledger(disk.path / "second")
    disk.fill()
    add(other, range(2000))
    with pytest.warns(SamestepWarning, match="the records stay in memory"):
        other.flush()
    with pytest.raises(LedgerError, match="the disk is full"):
        other.close()


def test_a_ledger_that_cannot_be_created_is_reported(disk):
    disk.fill()
    with pytest.raises(LedgerError, match=r"rank-00000\.bin cannot be written: the disk is full: free some space, or"):
        open_ledger(disk.path / "run")
