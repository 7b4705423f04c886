"""Two nodes on one machine: network namespaces with a link between them that tests can take down and bring up."""

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

from tests.elastic.kills import EPOCHS, TRAINING, Launch
from tests.launch.launched import LAUNCHERS, MARK, Started

ADDRESSES = {"a": "192.0.2.1", "b": "192.0.2.2"}
# A node counts as gone after 3 s, and a rendezvous waits 2 s for others; torch defaults to 15 s and 30 s.
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
SECONDS_PER_STEP, STEP_TIMEOUT = "0.2", "4"


@cache
def why_not() -> str | None:
    """Why nodes cannot be created here, or None."""
    if shutil.which("ip") is None:
        return "the command ip is missing: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with make_nodes():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be created: {error.stderr.strip()}"


@dataclass(frozen=True)
class Nodes:
    """Two nodes, a and b; a hosts the rendezvous."""

    tag: str

    def namespace(self, node: str) -> str:
        return f"samestep-{self.tag}-{node}"

    def interface(self, node: str) -> str:
        return f"ss{self.tag}{node}"

    def disconnect(self) -> None:
        _ip("-n", self.namespace("b"), "link", "set", self.interface("b"), "down")

    def connect(self) -> None:
        _ip("-n", self.namespace("b"), "link", "set", self.interface("b"), "up")

    def launch(self, node: str, folder: Path, out: Path) -> Launch:
        """Start the launcher of one node, with its logs in FOLDER/NODE."""
        address = ADDRESSES[node]
        options = [
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--folder", str(folder / node),
            "--rdzv-endpoint", f"{ADDRESSES['a']}:29400", "--local-addr", address, "--rdzv-conf", RENDEZVOUS,
        ]  # fmt: skip
        training = [str(TRAINING), str(out), str(EPOCHS), SECONDS_PER_STEP, STEP_TIMEOUT]
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
    """Create the namespaces and the link, and delete them in any case."""
    nodes = Nodes(uuid4().hex[:6])
    a, b, link_a, link_b = *map(nodes.namespace, "ab"), *map(nodes.interface, "ab")
    try:
        for namespace in (a, b):
            _ip("netns", "add", namespace)
        _ip("link", "add", link_a, "netns", a, "type", "veth", "peer", "name", link_b, "netns", b)
        for node, namespace, interface in (("a", a, link_a), ("b", b, link_b)):
            _ip("-n", namespace, "addr", "add", f"{ADDRESSES[node]}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", interface, "up")
        yield nodes
    finally:
        for namespace in (a, b):  # which deletes the link too
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
