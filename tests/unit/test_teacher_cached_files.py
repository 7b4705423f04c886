"""The files of a cache: a row that could not be written leaves the next ones whole, and no file open."""

import resource
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from samestep.errors import TeacherError
from samestep.teacher.cache_files import RowReader, RowWriter

RECORD = 56


@contextmanager
def limited(size):
    """No file may become longer: what is written beyond is cut off there, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def add(writer, index, row):
    return writer.add("texts", 0, index, (index, index), row)


def found(folder, count):
    """Every row that another process finds."""
    reader = RowReader(folder)
    reader.refresh()
    rows = [reader.sound("texts", index) for index in range(count)]
    reader.close()
    return rows


def open_files(folder):
    """Those of this process that lie in a folder; whatever else it has open may be closed at any time."""
    there = []
    for number in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            there.append(number.readlink())
    return sorted(path for path in there if path.is_relative_to(folder))


def refuse(writer, index, row):
    with pytest.raises(TeacherError, match=r"the cache .* cannot be written: .*; the rows already there stay good"):
        add(writer, index, row)


@pytest.fixture
def writer(tmp_path):
    made = RowWriter(tmp_path, 0)
    yield made
    made.close()


def test_a_row_of_which_half_was_written_leaves_the_next_ones_whole(tmp_path, writer):
    add(writer, 0, b"a" * 200)
    with limited(300):
        refuse(writer, 1, b"b" * 200)
    for index in (1, 2):
        entry = add(writer, index, b"c" * 200)
        assert entry.start == (index - 1) * 200, "in a file of its own"
    assert found(tmp_path, 3) == [b"a" * 200, b"c" * 200, b"c" * 200]


def test_a_record_of_which_half_was_written_hides_no_later_row(tmp_path, writer):
    add(writer, 0, b"a")
    with limited(RECORD + RECORD // 2):
        refuse(writer, 1, b"b")
    for index in (1, 2):
        add(writer, index, b"c")
    assert found(tmp_path, 3) == [b"a", b"c", b"c"]


def test_an_index_that_cannot_be_opened_is_no_hindrance_later_and_leaves_nothing_open(tmp_path, writer):
    writer._stem.with_suffix(".index").mkdir()
    before = open_files(tmp_path)
    refuse(writer, 0, b"a")
    assert open_files(tmp_path) == before
    (left,) = tmp_path.glob("*.index")
    left.rmdir()
    add(writer, 0, b"a")
    assert found(tmp_path, 1) == [b"a"]


def test_a_folder_that_was_away_for_a_while_is_written_again(tmp_path):
    folder = tmp_path / "cache"
    writer = RowWriter(folder, 0)
    refuse(writer, 0, b"a")
    folder.mkdir()
    add(writer, 0, b"a")
    writer.close()
    assert found(folder, 1) == [b"a"]
