"""Which accesses to files are ordered, by what the ranks do between them."""

import json

import pytest

from samestep.verify.file_order import FileOrder
from samestep.verify.rank_trace import RankTrace


def trace(folder, rank, *events):
    """The trace of a rank with these events, whose times are their positions unless they have one."""
    start = {"k": "start", "rank": rank, "size": 2}
    lines = [{"t": float(number), "s": 0, "p": 0, **event} for number, event in enumerate([start, *events])]
    path = folder / f"rank-{rank}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return RankTrace(path)


def collective(name, root=None):
    values = {"n": 0, "group": "world", "shapes": [], "dtypes": [], "source": None, "op": "", "value": None}
    call = {"k": "collective", "name": name, "site": None, "root": root, "grad": False, **values}
    return [call, {"k": "collective_end", "n": 0, "value": None, "is_async": False}]


def file(action, path="data", time=None, exclusive=False):
    event = {"k": "file", "action": action, "path": path, "mode": "", "exclusive": exclusive, "site": None}
    return event if time is None else {**event, "t": time}


def lock(held, time):
    return {"k": "lock", "path": "lock", "held": held, "t": time}


def is_ordered(folder, writer, reader):
    ranks = [trace(folder, 0, *writer), trace(folder, 1, *reader)]
    write = next(event for event in ranks[0].files if event.path == "data")
    read = next(event for event in ranks[1].files if event.path == "data")
    return FileOrder(ranks).is_ordered(0, write, 1, read)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (collective("barrier"), True),
        (collective("all_gather_object"), True),
        (collective("broadcast_object_list", 0), True),
        (collective("broadcast", 1), False),
        (collective("gather", 1), True),
        (collective("reduce", 0), False),
    ],
    ids=["barrier", "all_gather_object", "broadcast by the writer", "broadcast by the reader", "gather", "reduce"],
)
def test_a_collective_orders_what_its_direction_allows(tmp_path, call, expected):
    assert is_ordered(tmp_path, [file("write"), *call], [*call, file("read")]) is expected


def test_without_anything_in_between_accesses_are_not_ordered(tmp_path):
    barrier = collective("barrier")
    assert not is_ordered(tmp_path, [*barrier, file("write")], [*barrier, file("read")])


def test_a_message_orders_sender_and_receiver(tmp_path):
    assert is_ordered(tmp_path, [file("write"), *collective("send", 1)], [*collective("recv", 0), file("read")])
    assert not is_ordered(tmp_path, [*collective("send", 1), file("write")], [*collective("recv", 0), file("read")])


def test_a_lock_that_is_released_and_then_taken_orders_what_is_outside_of_it(tmp_path):
    writer = [lock(True, 1.0), file("write", time=2.0), lock(False, 3.0)]
    assert is_ordered(tmp_path, writer, [lock(True, 4.0), lock(False, 5.0), file("read", time=6.0)])
    assert not is_ordered(tmp_path, writer, [lock(True, 0.1), lock(False, 0.2), file("read", time=6.0)])


def test_a_renamed_file_is_complete_for_who_opens_it_later(tmp_path):
    assert is_ordered(tmp_path, [file("rename", time=1.0)], [file("read", time=2.0)])
    assert not is_ordered(tmp_path, [file("rename", time=2.0)], [file("read", time=1.0)])


def test_a_file_that_exists_says_that_what_was_written_before_it_is_complete(tmp_path):
    writer = [file("write", time=1.0), file("write", "flag", time=2.0)]
    assert is_ordered(
        tmp_path, writer, [{"k": "exists", "path": "flag", "found": True, "t": 3.0}, file("read", time=4.0)]
    )
    found = {"k": "exists", "path": "data", "found": True, "t": 3.0}  # it may be half written
    assert not is_ordered(tmp_path, writer, [found, file("read", time=4.0)])
