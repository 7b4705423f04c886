"""Disks that take nothing: what is held back, what is told, and what goes on when there is room again."""

import errno
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from samestep.checkpoint import checkpoint_folder as lock
from samestep.data.ledger import RECORD, LedgerWriter, ShardDescription, rank_file, shard_folder, sound
from samestep.disk import describe_os_error
from samestep.errors import LedgerError
from samestep.loggers import jsonl as appended
from samestep.loggers.console import open_console
from samestep.loggers.jsonl import AppendedFile, MetricsFile, read_metrics
from samestep.loggers.loggers import open_loggers
from samestep.loggers.tensorboard import open_tensorboard
from samestep.messages import SamestepWarning
from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 128) as disk:
        yield disk


@pytest.fixture
def at_once(monkeypatch):
    """A disk that took nothing is tried again with the next record, not seconds later."""
    monkeypatch.setattr(appended, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full: make room"),
        (errno.EDQUOT, "the quota is used up: make room"),
        (errno.EROFS, "the disk is read-only: choose another folder"),
        (errno.EACCES, "there is no permission: choose a folder that you may write, or change its permissions"),
        (errno.EFBIG, "the file may not become so large: raise the limit (ulimit -f)"),
        (errno.ETIMEDOUT, "as the system says"),
    ],
)
def test_why_a_disk_takes_nothing_is_told_in_words(number, words):
    assert describe_os_error(OSError(number, "as the system says")) == words


# Files of a log


def test_records_wait_for_room_and_none_is_lost_or_torn(disk, at_once):
    warned, said = [], []
    path = disk.path / "metrics.jsonl"
    file = MetricsFile(path, lambda: 1.0, warned.append, said.append)
    file.write(0, {"train/loss": 0.5})
    disk.fill()
    for step in range(1, 400):  # more than what is free in the last page
        file.write(step, {"train/loss": 0.5})
    assert warned == [
        f"{path} cannot be written: the disk is full: make room; training goes on, and what belongs into it is added "
        "when it can be, tried every 0 s"
    ]
    assert all(line.endswith("}") for line in path.read_text().splitlines())  # no half record
    assert len(read_metrics(path)) < 400
    disk.mend()
    file.write(400, {"train/loss": 0.5})
    assert said == [f"{path} is written again; nothing is missing in it"]
    file.close({})
    assert [record["step"] for record in read_metrics(path)] == list(range(401))
    assert len(warned) == 1


def test_a_disk_that_took_nothing_is_left_alone_for_a_while(disk):
    said = []
    file = AppendedFile(disk.path / "log.txt", lambda _: None, said.append)
    disk.fill()
    block = b"x" * 8191 + b"\n"
    file.append(block)
    disk.mend()
    file.append(block)
    assert not said  # ten seconds have not passed
    file.close()  # but at the end it is tried once more
    assert said
    assert (disk.path / "log.txt").read_bytes() == block * 2


def test_of_what_waits_too_much_the_oldest_goes_and_is_counted(disk, at_once, monkeypatch):
    monkeypatch.setattr(appended, "_HELD_BYTES", 10 * 4000)
    said = []
    file = AppendedFile(disk.path / "log.txt", lambda _: None, said.append)
    disk.fill()
    for number in range(16):
        file.append(f"{number:03999}\n".encode())
    disk.mend()
    file.append(f"{16:03999}\n".encode())
    file.close()
    assert said == [f"{disk.path / 'log.txt'} is written again; 7 record(s) of the time before are missing in it"]
    assert [int(line) for line in (disk.path / "log.txt").read_text().split()] == list(range(7, 17))


def test_what_a_full_disk_does_not_take_at_the_end_is_told(disk):
    warned = []
    file = AppendedFile(disk.path / "log.txt", warned.append)
    file.append(b"first\n")
    disk.fill()
    for _ in range(3):
        file.append(b"x" * 8191 + b"\n")
    file.close()
    file.close()
    assert warned[1:] == [f"{disk.path / 'log.txt'} lacks 3 record(s) at its end: the disk is full: make room"]
    assert (disk.path / "log.txt").read_text() == "first\n"


def test_curves_go_on_where_they_were_when_there_is_room_again(disk, at_once, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("samestep.loggers.tensorboard._FLUSH_SECONDS", 0.0)
    warned = []
    sink = open_tensorboard(disk.path, warned.append)
    sink.write(0, {"train/loss": 1.0})
    disk.fill()
    for step in range(1, 200):
        sink.write(step, {"train/loss": 1.0})
    disk.mend()
    sink.write(200, {"train/loss": 1.0})
    sink.close({})
    read = EventAccumulator(str(disk.path), size_guidance={"scalars": 0})
    read.Reload()
    assert [point.step for point in read.Scalars("train/loss")] == list(range(201))
    assert len(warned) == 1


def test_a_folder_that_cannot_be_made_costs_the_files_and_nothing_else(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    warned = []
    sinks = open_loggers(tmp_path / "taken" / "run", open_console(sys.stdout), warned.append)
    sinks.write(1, {"train/loss": 0.5})
    sinks.say("hello")
    sinks.close({"steps": 1})
    assert "hello" in capsys.readouterr().out
    assert all("a file stands where a folder is needed: choose another folder" in text for text in warned)
    named = {Path(text.split(" ")[0]).name.split(".")[0] for text in warned}
    assert named == {"log", "metrics", "events", "summary"}


def test_a_disk_that_is_read_only_costs_the_files_and_nothing_else(disk, at_once, capsys):
    warned = []
    disk.freeze(True)
    sinks = open_loggers(disk.path / "run", open_console(sys.stdout), warned.append)
    sinks.write(1, {"train/loss": 0.5})
    sinks.write(2, {"train/loss": 0.5})
    told = "metrics.jsonl cannot be written: the disk is read-only: choose another folder"
    assert sum(told in text for text in warned) == 1
    disk.freeze(False)
    sinks.write(3, {"train/loss": 0.5})
    sinks.close({"steps": 3})
    assert [record["step"] for record in read_metrics(disk.path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((disk.path / "run" / "summary.json").read_text()) == {"steps": 3}
    told = capsys.readouterr().out
    assert "metrics.jsonl is written again; nothing is missing in it" in told
    assert "metrics.jsonl is written again" in (disk.path / "run" / "log.txt").read_text()


def test_a_console_whose_own_disk_is_full_ends_nothing():
    stream = Path("/dev/full").open("w")  # noqa: SIM115  # closing it is an error, as is all that is written to it
    console = open_console(stream)
    console.say("hello")
    console.say("again")
    with pytest.raises(OSError, match="No space left"):
        stream.close()


# The lock


def test_a_lock_that_cannot_be_written_is_not_left_behind_half(disk):
    disk.fill()
    assert lock.hold(disk.path) is None
    assert not (disk.path / "run.lock").exists()


# The ledger

WHOLE = ShardDescription(n=4000, seed=0, shuffle=True, global_batch=2)


def records(folder):
    return np.fromfile(rank_file(shard_folder(folder, "train"), 0), dtype=RECORD)


def open_ledger(folder):
    return LedgerWriter(folder, "train", WHOLE, rank=0, size=1, generation=0)


def add(writer, steps):
    for step in steps:
        writer.add(0, step, 2 * step, 2)


def test_a_ledger_waits_for_room_with_one_warning_and_loses_nothing(disk):
    writer = open_ledger(disk.path)
    add(writer, range(10))
    writer.sync()
    disk.fill()
    with warnings.catch_warnings(record=True, category=SamestepWarning) as given:
        warnings.simplefilter("always")
        for first in range(10, 1000, 10):
            add(writer, range(first, first + 10))
            writer.flush()
    path = rank_file(shard_folder(disk.path, "train"), 0)
    assert [str(each.message) for each in given] == [
        f"the ledger {path} cannot be written: the disk is full: make room; training goes on, its records wait in "
        "memory, and no checkpoint is saved before they are on the disk"
    ]
    with pytest.raises(LedgerError, match=r"cannot be written: the disk is full: make room, or run with ledger=False"):
        writer.sync()
    disk.mend()
    writer.sync()
    writer.close()
    written = records(disk.path)
    assert sound(written).all()
    assert written["step"][1:-1].tolist() == list(range(1000))


def test_a_ledger_that_is_not_whole_at_the_end_is_an_error_of_a_run_that_went_well_alone(disk):
    writer = open_ledger(disk.path)
    disk.fill()
    add(writer, range(2000))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        writer.close(failed=True)  # its own error is to be seen, not this one
    assert "cannot be written: the disk is full: make room, or run with ledger=False" in str(given[-1].message)
    disk.mend()
    (disk.path / "second").mkdir()
    other = open_ledger(disk.path / "second")
    disk.fill()
    add(other, range(2000))
    with pytest.warns(SamestepWarning, match="its records wait in memory"):
        other.flush()
    with pytest.raises(LedgerError, match="the disk is full"):
        other.close()


def test_a_ledger_that_cannot_begin_is_told(disk):
    disk.fill()
    with pytest.raises(LedgerError, match=r"rank-00000\.bin cannot be written: the disk is full: make room, or run wi"):
        open_ledger(disk.path / "run")
