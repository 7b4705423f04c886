"""Two nodes, one of which joins later, is disconnected, or loses its launcher."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.elastic.kills import Launch, audited_world_sizes, largest_weight_difference, launch
from tests.elastic.nodes import Nodes
from tests.launch.launched import start, wait_for
from tests.warm import free_port

pytestmark = pytest.mark.slow


@contextmanager
def ended_in_any_case(*launches: Launch) -> Iterator[None]:
    """Kill all processes of these launches in any case."""
    try:
        yield
    finally:
        for launched in launches:
            for process in launched.started.processes():
                process.kill()
            launched.started.process.communicate(timeout=120)


def finish(launched: Launch, node: str) -> None:
    ended = launched.started.finish()
    assert (ended.code, ended.left) == (0, []), f"node {node}: {ended.err}"


def test_after_a_rank_is_killed_both_nodes_resume(tmp_path: Path, undisturbed: Path):
    """The launcher of the killed rank counts a restart; the other one may only see that the nodes changed."""
    out = tmp_path / "out"
    port = free_port()
    rendezvous = ("--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=5")
    options = ("--nproc-per-node", "1", "--max-restarts", "5", *rendezvous)
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = (launch(tmp_path / name, out, *options, pause=0.1) for name in "ab")
    with ended_in_any_case(a, b):
        for fraction in (0.0, 0.9):
            victim = a.wait_until("computing", 3, fraction=fraction, size=2)
            a.ignore_all_so_far()
            os.kill(victim.pid, signal.SIGKILL)
        a.wait_until("computing", 3, size=2)
        (out / "hurry").touch()
        finish(a, "a")
        finish(b, "b")
    assert audited_world_sizes(out)[-1] == 2
    assert largest_weight_difference(undisturbed, out) < 1e-6


ALONE_OR_NOT = """
    import os, time
    if os.environ["WORLD_SIZE"] == "1":
        open("alone", "w").close()
        time.sleep(100)
    open("up-" + os.environ["RANK"], "w").close()
"""


def test_a_node_without_an_endpoint_starts_alone_and_prints_the_join_command(tmp_path: Path):
    options = ("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1")
    command = ("--nnodes", "1:4", *options, "--folder", "first", "train.py")
    with (tmp_path / "stderr").open("w") as stderr:
        first = start(tmp_path, ALONE_OR_NOT, *command, stderr=stderr)
    try:
        wait_for((tmp_path / "alone").exists, 150)
        text = (tmp_path / "stderr").read_text()
        prefix = "samestep: this node hosts the rendezvous; to join, run on another node: samestep run "
        join = text.splitlines()[0].removeprefix(prefix).removesuffix(" ...").split()
        assert join[:4] == ["--nnodes", "1:4", "--rdzv-endpoint", join[3]], text
        second = start(tmp_path, ALONE_OR_NOT, *join, *options, "--folder", "second", "train.py").finish(100)
    finally:
        ended = first.finish(60)
    assert (second.code, ended.code, second.left, ended.left) == (0, 0, [], []), second.err
    assert sorted(path.name for path in tmp_path.glob("up-*")) == ["up-0", "up-1"]


SAVES_ON_SIGTERM = """
    import os, signal, sys, time
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    signal.signal(signal.SIGTERM, lambda *_: open(f"sigterm-{size}", "w").close())
    with open(f"up-{size}-{rank}", "w") as file:
        file.write(os.environ["TORCHELASTIC_RUN_ID"])
    while size != "3":
        if os.path.exists(f"sigterm-{size}"):
            sys.exit(75)  # as all ranks do after one of them received SIGTERM
        time.sleep(0.01)
"""


def test_a_third_node_joins_although_only_one_launcher_has_seen_it(tmp_path: Path):
    """The launcher that sees a new node first asks its ranks to save; the ranks of the other node save with them."""
    port = free_port()
    rendezvous = ("--nnodes", "2:3", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1")
    started = [start(tmp_path, SAVES_ON_SIGTERM, *rendezvous, "--nproc-per-node", "1", "train.py") for _ in range(2)]
    try:
        wait_for(lambda: len(list(tmp_path.glob("up-2-*"))) == 2, 150)
        started.append(start(tmp_path, SAVES_ON_SIGTERM, *rendezvous, "--nproc-per-node", "1", "train.py"))
    finally:
        ended = [each.finish(60) for each in reversed(started)]
    assert [each.code for each in ended] == [0, 0, 0], "".join(each.err for each in ended)
    assert len(list(tmp_path.glob("up-3-*"))) == 3
    names = {path.read_text() for path in tmp_path.glob("up-*")}  # of ranks on three nodes, before and after a restart
    assert len(names) == 1
    assert not names & {"samestep", "none", ""}  # which ranks of another launch would have too


def test_a_disconnected_node_joins_again_when_the_link_is_back(nodes: Nodes, tmp_path: Path, undisturbed: Path):
    out = tmp_path / "out"
    a, b = nodes.launch("a", tmp_path, out), nodes.launch("b", tmp_path, out)
    with ended_in_any_case(a, b):
        a.wait_until("computing", 3, size=2)
        a.ignore_all_so_far()
        nodes.disconnect()
        a.wait_until("computing", 3, size=1)
        a.ignore_all_so_far()
        nodes.connect()
        a.wait_until("computing", 3, size=2)
        (out / "hurry").touch()
        finish(a, "a")
        finish(b, "b")
    assert audited_world_sizes(out)[-3:] == [2, 1, 2]
    assert largest_weight_difference(undisturbed, out) < 1e-6


def test_a_node_joins_later_and_after_its_launcher_is_killed_its_ranks_end_and_the_other_node_continues(
    nodes: Nodes, tmp_path: Path, undisturbed: Path
):
    out = tmp_path / "out"
    a = nodes.launch("a", tmp_path, out)
    with ended_in_any_case(a):
        assert a.wait_until("computing", 3).size == 1
        a.ignore_all_so_far()
        b = nodes.launch("b", tmp_path, out)
        with ended_in_any_case(b):
            a.wait_until("computing", 3, size=2)
            a.ignore_all_so_far()
            os.kill(b.started.process.pid, signal.SIGKILL)
            wait_for(lambda: not b.started.processes(), 150)
            a.wait_until("computing", 3, size=1)
            (out / "hurry").touch()
            finish(a, "a")
    stderr = "".join(path.read_text() for path in (tmp_path / "b" / "logs").glob("attempt-0/rank-*.err"))
    assert f"exits because its launcher (process {b.started.process.pid}) is gone" in stderr.splitlines()[-1]
    assert audited_world_sizes(out) == [1, 2, 1]
    assert largest_weight_difference(undisturbed, out) < 1e-6
