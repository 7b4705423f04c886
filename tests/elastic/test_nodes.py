"""Two nodes, one of which comes later, is cut off, or loses its launcher."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.elastic.killing import Launch, audited_world_sizes, furthest_weight, launch
from tests.elastic.nodes import Nodes
from tests.launch.started import start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


@contextmanager
def both_ended(*launches: Launch) -> Iterator[None]:
    """Whatever fails, no process of these launches is left."""
    try:
        yield
    finally:
        for live in launches:
            for process in live.started.processes():
                process.kill()
            live.started.process.communicate(timeout=20)


def finish(live: Launch, node: str) -> None:
    ended = live.started.finish()
    assert (ended.code, ended.left) == (0, []), f"node {node}: {ended.err}"


def test_a_rank_killed_on_one_of_two_nodes_brings_both_back(tmp_path: Path, undisturbed: Path):
    """The launcher of the killed rank counts a restart; the other may only see that nodes changed."""
    out = tmp_path / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=5")
    options = ("--nproc-per-node", "1", "--max-restarts", "5", *meeting)
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = (launch(tmp_path / name, out, *options, pause=0.1) for name in "ab")
    with both_ended(a, b):
        for luck in (0.0, 0.9):
            victim = a.wait_until("computing", 3, luck=luck, size=2)
            a.ignore_all_so_far()
            os.kill(victim.pid, signal.SIGKILL)
        a.wait_until("computing", 3, size=2)
        (out / "hurry").touch()
        finish(a, "a")
        finish(b, "b")
    assert audited_world_sizes(out)[-1] == 2
    assert furthest_weight(undisturbed, out) < 1e-6


ALONE_OR_NOT = """
    import os, time
    if os.environ["WORLD_SIZE"] == "1":
        open("alone", "w").close()
        time.sleep(100)
    open("up-" + os.environ["RANK"], "w").close()
"""


def test_a_node_that_named_no_meeting_place_begins_alone_and_says_how_another_joins_it(tmp_path: Path):
    options = ("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1")
    with (tmp_path / "said").open("w") as said:
        first = start(tmp_path, ALONE_OR_NOT, "--nnodes", "1:4", *options, "--folder", "first", "train.py", stderr=said)
    try:
        wait_for((tmp_path / "alone").exists, 60)
        told = (tmp_path / "said").read_text()
        start_of_line = "samestep: the nodes meet on this one; to join, type on another: samestep run "
        joining = told.splitlines()[0].removeprefix(start_of_line).removesuffix(" ...").split()
        assert joining[:4] == ["--nnodes", "1:4", "--rdzv-endpoint", joining[3]], told
        second = start(tmp_path, ALONE_OR_NOT, *joining, *options, "--folder", "second", "train.py").finish(100)
    finally:
        ended = first.finish(60)
    assert (second.code, ended.code, second.left, ended.left) == (0, 0, [], []), second.err
    assert sorted(path.name for path in tmp_path.glob("up-*")) == ["up-0", "up-1"]


SAVES_WHEN_TOLD = """
    import os, signal, sys, time
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    signal.signal(signal.SIGTERM, lambda *_: open(f"told-{size}", "w").close())
    open(f"up-{size}-{rank}", "w").close()
    while size != "3":
        if os.path.exists(f"told-{size}"):
            sys.exit(75)  # as all ranks do once one of them was told
        time.sleep(0.01)
"""


def test_a_third_node_is_taken_in_though_the_first_to_see_it_lets_the_ranks_of_the_second_save_and_end(tmp_path: Path):
    """The launcher that sees a new node first asks its ranks to end; those of the other node have not been asked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes", "2:3", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1")
    live = [start(tmp_path, SAVES_WHEN_TOLD, *meeting, "--nproc-per-node", "1", "train.py") for _ in range(2)]
    try:
        wait_for(lambda: len(list(tmp_path.glob("up-2-*"))) == 2, 60)
        live.append(start(tmp_path, SAVES_WHEN_TOLD, *meeting, "--nproc-per-node", "1", "train.py"))
    finally:
        ended = [each.finish(60) for each in reversed(live)]
    assert [each.code for each in ended] == [0, 0, 0], "".join(each.err for each in ended)
    assert len(list(tmp_path.glob("up-3-*"))) == 3


def test_a_node_that_is_cut_off_comes_back_when_the_link_is_mended(nodes: Nodes, tmp_path: Path, undisturbed: Path):
    out = tmp_path / "out"
    a, b = nodes.launch("a", tmp_path, out), nodes.launch("b", tmp_path, out)
    with both_ended(a, b):
        a.wait_until("computing", 3, size=2)
        a.ignore_all_so_far()
        nodes.cut()
        a.wait_until("computing", 3, size=1)
        a.ignore_all_so_far()
        nodes.mend()
        a.wait_until("computing", 3, size=2)
        (out / "hurry").touch()
        finish(a, "a")
        finish(b, "b")
    assert audited_world_sizes(out)[-3:] == [2, 1, 2]
    assert furthest_weight(undisturbed, out) < 1e-6


def test_a_node_that_joins_later_is_taken_in_and_when_its_launcher_is_killed_leaves_no_orphan_and_the_other_goes_on(
    nodes: Nodes, tmp_path: Path, undisturbed: Path
):
    out = tmp_path / "out"
    a = nodes.launch("a", tmp_path, out)
    with both_ended(a):
        assert a.wait_until("computing", 3).size == 1
        a.ignore_all_so_far()
        b = nodes.launch("b", tmp_path, out)
        with both_ended(b):
            a.wait_until("computing", 3, size=2)
            a.ignore_all_so_far()
            os.kill(b.started.process.pid, signal.SIGKILL)
            wait_for(lambda: not b.started.processes(), 60)
            a.wait_until("computing", 3, size=1)
            (out / "hurry").touch()
            finish(a, "a")
    said = "".join(path.read_text() for path in (tmp_path / "b" / "logs").glob("attempt-0/rank-*.err"))
    assert f"ends itself: its launcher, process {b.started.process.pid}, is gone" in said.splitlines()[-1]
    assert audited_world_sizes(out) == [1, 2, 1]
    assert furthest_weight(undisturbed, out) < 1e-6
