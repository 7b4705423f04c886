"""Two nodes on one machine: network namespaces joined by a cable that can be cut and mended."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

from tests.elastic.killing import EPOCHS, TRAINING, Launch
from tests.launch.started import LAUNCHERS, MARK, Started

ADDRESSES = {"a": "192.0.2.1", "b": "192.0.2.2"}
# A node that is silent for 3 s is gone, and who meets waits 2 s for others: torch has 15 s and 30 s, for clusters.
MEETING = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
SECONDS_A_STEP, PATIENCE = "0.2", "4"


@cache
def why_not() -> str | None:
    """The reason for which there can be no nodes here, or None."""
    if shutil.which("ip") is None:
        return "the command ip is missing: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with make_nodes():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"


@dataclass(frozen=True)
class Nodes:
    """Two nodes, a and b; the launchers meet on a."""

    tag: str

    def namespace(self, node: str) -> str:
        return f"samestep-{self.tag}-{node}"

    def interface(self, node: str) -> str:
        return f"ss{self.tag}{node}"

    def cut(self) -> None:
        _ip("-n", self.namespace("b"), "link", "set", self.interface("b"), "down")

    def mend(self) -> None:
        _ip("-n", self.namespace("b"), "link", "set", self.interface("b"), "up")

    def launch(self, node: str, folder: Path, out: Path) -> Launch:
        """Start the launcher of one node; its logs lie in FOLDER/NODE."""
        address = ADDRESSES[node]
        options = [
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--folder", str(folder / node),
            "--rdzv-endpoint", f"{ADDRESSES['a']}:29400", "--local-addr", address, "--rdzv-conf", MEETING,
        ]  # fmt: skip
        training = [str(TRAINING), str(out), str(EPOCHS), SECONDS_A_STEP, PATIENCE]
        mark = uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(node), sys.executable, "-m", "samestep", "run", *options, *training],
            env={**inherited, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface(node), MARK: mark},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        return Launch(Started(process, folder, mark), out)


@contextmanager
def make_nodes() -> Iterator[Nodes]:
    """Lay the cable; in any case nothing of it is left."""
    nodes = Nodes(uuid4().hex[:6])
    a, b, at_a, at_b = *map(nodes.namespace, "ab"), *map(nodes.interface, "ab")
    try:
        for namespace in (a, b):
            _ip("netns", "add", namespace)
        _ip("link", "add", at_a, "netns", a, "type", "veth", "peer", "name", at_b, "netns", b)
        for node, namespace, interface in (("a", a, at_a), ("b", b, at_b)):
            _ip("-n", namespace, "addr", "add", f"{ADDRESSES[node]}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", interface, "up")
        yield nodes
    finally:
        for namespace in (a, b):  # the cable goes with its ends
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
