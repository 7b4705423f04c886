"""Faults of the machine: an interrupted network between two nodes, a full disk, no memory left."""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from uuid import uuid4

import pytest

from tests.elastic.nodes import ADDRESSES, Nodes, make_nodes, why_not
from tests.hang.injected_faults import IF_ALL, ON_CPU, SCRIPTS, Case, Launch, check
from tests.launch.launched import LAUNCHERS, MARK, Started, wait_for
from tests.small_disk import small_disk

pytestmark = pytest.mark.slow

KINDS = ["plain_ddp", "samestep_run"]
if "SAMESTEP_TESTS_ALL_HANGS" in os.environ:
    KINDS += ["lightning_trainer", "accelerate_loop"]
GENEROUS = 150.0
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
SECOND = {"a": "198.51.100.1", "b": "198.51.100.2"}  # addresses of the network of the ranks


def test_a_full_disk_is_named(tmp_path: Path):
    with ExitStack() as stack:
        disks = {script: stack.enter_context(small_disk(tmp_path / f"disk-{script}", 2048)).path for script in KINDS}

        def link(folder: Path) -> None:
            (folder / "disk").symlink_to(disks[folder.name.removesuffix("-full_disk")])

        cases = [Case(script, "full_disk", "full_disk", prepare=link) for script in KINDS]
        for launch in check(cases, tmp_path):
            assert f"the file system {disks[launch.case.script]} is full" in launch.console


@contextmanager
def memory_limit(mebibytes: int) -> Generator[Path]:
    """A cgroup with a limit; skips the test if none can be created."""
    folder = MEMORY_CGROUPS / f"samestep-{uuid4().hex[:6]}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(mebibytes * 2**20))
    except OSError as error:
        pytest.skip(f"a cgroup with a memory limit cannot be created here: {error}")
    try:
        yield folder
    finally:
        wait_for(lambda: not (folder / "tasks").read_text(), GENEROUS)
        folder.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_named(tmp_path: Path):
    def case(script: str, cgroup: Path) -> Case:
        return Case(
            script,
            "memory",
            None,  # rank 0 may have waited for long before
            says=r"rank 1 +pid \d+ +killed by SIGKILL: .*out-of-memory killer.*  <- ",
            code=137,
            preexec=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
        )

    with ExitStack() as stack:
        check([case(script, stack.enter_context(memory_limit(1500))) for script in KINDS], tmp_path)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes with two networks: one for the launchers, one for the ranks."""
    reason = why_not()
    if reason is not None:
        assert "SAMESTEP_TESTS_NEED_NODES" not in os.environ, reason
        pytest.skip(reason)
    with make_nodes() as made:
        links = [second_link(made, node) for node in "ab"]
        a, b = map(made.namespace, "ab")
        ip("link", "add", links[0], "netns", a, "type", "veth", "peer", "name", links[1], "netns", b)
        for node, namespace, link in (("a", a, links[0]), ("b", b, links[1])):
            ip("-n", namespace, "addr", "add", f"{SECOND[node]}/24", "dev", link)
            ip("-n", namespace, "link", "set", link, "up")
        yield made


def second_link(nodes: Nodes, node: str) -> str:
    return f"sr{nodes.tag}{node}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def launch(nodes: Nodes, node: str, script: str, folder: Path) -> Launch:
    """Start the launcher of one node in a folder for both; its ranks use the second network."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text((SCRIPTS / f"{script}.py").read_text())
    (folder / "faults.py").write_text((SCRIPTS / "faults.py").read_text())
    mark, inherited = uuid4().hex, {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    options = [
        "--nnodes", "2", "--nproc-per-node", "1", "--folder", f"kept-{node}", "--rdzv-endpoint",
        f"{ADDRESSES['a']}:{29400 + KINDS.index(script)}", "--local-addr", ADDRESSES[node], "train.py", "interrupted",
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": second_link(nodes, node), "HANG_TIMEOUT": "20", **ON_CPU}
    with (folder / f"console-{node}").open("w") as console:
        process = subprocess.Popen(
            ["ip", "netns", "exec", nodes.namespace(node), sys.executable, "-m", "samestep", "run", *options],
            env={**inherited, **variables, MARK: mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=console,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    case = Case(script, "interrupted", "network", culprits=(), at="")
    return Launch(
        case, Started(process, folder, mark), time.monotonic(), run_folder=f"kept-{node}", output=f"console-{node}"
    )


def interrupt(nodes: Nodes, folders: Iterable[Path]) -> None:
    """Interrupt the network of the ranks when all have trained some steps, and let them call the next collective."""
    folders = list(folders)
    files = [folder / f"disturbed-{rank}" for folder in folders for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in files), GENEROUS)
    ip("-n", nodes.namespace("b"), "link", "set", second_link(nodes, "b"), "down")
    for folder in folders:
        (folder / "interrupted").touch()


def test_an_interrupted_network_between_two_nodes_is_named(tmp_path: Path, nodes: Nodes):
    """The launchers still reach each other, so all that is known is on node 0."""
    launches = {script: [launch(nodes, node, script, tmp_path / script) for node in "ab"] for script in KINDS}
    try:
        interrupt(nodes, [tmp_path / script for script in KINDS])
        for each in chain(*launches.values()):
            each.started.process.wait(GENEROUS)
    finally:
        consoles = "\n".join(each.console for each in chain(*launches.values()))
        left = [process for each in chain(*launches.values()) for process in each.started.processes()]
        for process in left:
            process.kill()
    assert not left, consoles
    for of_nodes in launches.values():
        check_interrupted(of_nodes, "\n".join(each.console for each in of_nodes))


def check_interrupted(launches: list[Launch], consoles: str) -> None:
    assert [each.started.process.returncode for each in launches] == [1, 1], consoles
    (report,) = launches[0].reports
    cause = report["cause"]
    assert (cause["kind"], cause["culprits"], cause["waiting"]) == ("network", [], [0, 1]), consoles
    frames = [f"{each['frame']['file']}:{each['frame']['line']}" for each in cause["sentences"] if each["frame"]]
    assert set(frames) <= launches[0].lines("waits"), consoles
    assert frames, consoles
    headline = "in the same collective, which does not complete: the network may be interrupted."
    for each in launches:
        assert headline in each.console, consoles
        assert "victim: " in each.console, consoles


@IF_ALL
def test_a_node_that_is_unreachable_is_named(tmp_path: Path, nodes: Nodes):
    """Neither the ranks nor the launchers reach each other. The one that hosts the rendezvous explains it.

    The other one waits for minutes for torch's rendezvous, so that this test ends it.
    """
    launches = [launch(nodes, node, "plain_ddp", tmp_path / "both") for node in "ab"]
    try:
        interrupt(nodes, [tmp_path / "both"])
        nodes.disconnect()
        main = launches[0]
        main.started.process.wait(GENEROUS)
        left = main.started.processes()
    finally:
        consoles = "\n".join(each.console for each in launches)
        for process in [process for each in launches for process in each.started.processes()]:
            process.kill()
        launches[1].started.process.wait(GENEROUS)
    assert not left, consoles
    assert len(main.reports) == 1, consoles
    cause = main.reports[0]["cause"]
    assert (cause["kind"], len(cause["culprits"]), len(cause["waiting"])) == ("node_lost", 1, 1), consoles
    assert "does not answer: its node is down or unreachable" in main.console
