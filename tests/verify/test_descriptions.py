"""How verify names what it has seen: calls that look the same, code without a file, and what was not compared."""

import pytest

from samestep.findings import Location
from samestep.verify.check import counted
from samestep.verify.checks.diverging_collectives import describe
from samestep.verify.control_flow import Divergence
from samestep.verify.recorder.recorder import Recorder, RecorderSettings
from samestep.verify.trace_events import SyncPoint

SITE = (Location("/lab/train.py", 27),)


def test_calls_at_the_same_line_differ_by_their_batches():
    points = {rank: SyncPoint("DDP backward pass", "world", SITE, 0, 3, batches=4 + rank) for rank in (0, 1)}
    assert describe([None, None], Divergence(0, points)) == (
        "rank 0 calls DDP backward pass at /lab/train.py:27 for batch 4, "
        "rank 1 calls DDP backward pass at /lab/train.py:27 for batch 5"
    )


def test_calls_at_the_same_line_differ_by_their_root():
    points = {rank: SyncPoint("broadcast", "world", SITE, 0, 3, root=rank) for rank in (0, 1)}
    assert describe([None, None], Divergence(0, points)).endswith("at /lab/train.py:27 with root 1")


@pytest.mark.parametrize(
    ("file", "expected"), [("<frozen os>", "<frozen os>"), ("/tmp/mirror/train.py", "/home/ann/train.py")]
)
def test_the_path_of_code_is_that_of_the_user(tmp_path, file, expected):
    settings = RecorderSettings(str(tmp_path), "many", 2, 1, 1, 1.0, 0, "", mirror=("/tmp/mirror", "/home/ann"))
    assert Recorder(settings, 0).original_path(file) == expected


@pytest.mark.parametrize(("number", "expected"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_a_number_has_its_noun(number, expected):
    assert counted(number, "rank") == expected
