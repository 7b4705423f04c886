"""What launchers exchange about a hang: with each other through the rendezvous store, with users through files."""

import json
import logging
import os
import queue
import socket
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from samestep.disk import write_atomically
from samestep.environment.processes import process_namespace, process_runs, seconds_from_boot
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store

_WAIT_SECONDS = 2.0  # that a launcher waits for one operation of the store, or of a file system
_SKIPS = 5  # looks, at most, for the text of a request that has a number
_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class NodeInfo:
    """A node of the run: the host of its launcher, and its ranks."""

    host: str
    ranks: list[int]


@dataclass(frozen=True)
class Request:
    """What the launcher of node 0 asks of all: `look` for evidence, or `end` the ranks."""

    number: int
    kind: str
    value: dict[str, Any]


class BoundedThread:
    """Runs operations that may wait for minutes, one after the other; the caller gets None after two seconds.

    Several threads may call it: each waits until that of the others is complete, also for at most two seconds.
    """

    def __init__(self, name: str) -> None:
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn, self._is_busy = threading.Lock(), threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._operations.put(None)

    def call(self, operation: Callable[[], _Value]) -> _Value | None:
        """The result of an operation; None if it fails, or waits for too long, or an earlier one still waits."""
        if not self._turn.acquire(timeout=_WAIT_SECONDS):
            return None
        try:
            return None if self._is_busy.is_set() else self._perform(operation)
        finally:
            self._turn.release()

    def _perform(self, operation: Callable[[], _Value]) -> _Value | None:
        result: queue.SimpleQueue[_Value | None] = queue.SimpleQueue()
        self._is_busy.set()

        def perform() -> None:
            value = None
            try:
                value = operation()
            except Exception as error:  # noqa: BLE001  # of any kind of store, after its host has gone
                _log.info("an operation of the watch for hangs: %s", error)
            self._is_busy.clear()
            result.put(value)

        self._operations.put(perform)
        try:
            return result.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            return None

    def _work(self) -> None:
        while (operation := self._operations.get()) is not None:
            operation()


class NodeStore:
    """The launchers of all nodes of an attempt, which read one counter of requests per second."""

    def __init__(self, store: "Store", prefix: str, node: int, nodes: int) -> None:
        self._store, self._prefix, self.node, self.nodes = store, prefix, node, nodes
        self._seen, self._skips = 0, 0  # requests, and how often the text of the next one was missing
        self._has_wait = False  # of this node in the store
        self._thread = BoundedThread("samestep hang store")
        self._call, self.close = self._thread.call, self._thread.close

    def introduce(self, info: NodeInfo) -> None:
        """Let the other launchers know this node."""
        self.set(f"node/{self.node}", json.dumps(asdict(info)))

    def read_nodes(self) -> dict[int, NodeInfo]:
        """The nodes that have introduced themselves."""
        values = {node: self.get(f"node/{node}") for node in range(self.nodes)}
        return {node: NodeInfo(**json.loads(text)) for node, text in values.items() if text}

    def request(self, kind: str, value: dict[str, Any] | None = None) -> int | None:
        """Ask all launchers; returns the number of the request, or None if the store does not answer."""
        text = json.dumps({"kind": kind, "value": value or {}})

        def perform() -> int:  # as one operation: if the store is slow, the text still follows its number
            number = self._store.add(f"{self._prefix}/requests", 1)
            self._store.set(f"{self._prefix}/request/{number}", text)
            return number

        return self._call(perform)

    def new_requests(self) -> list[Request]:
        """Requests since the last call: one operation of the store if there is none."""
        count = self._call(lambda: self._store.add(f"{self._prefix}/requests", 0)) or 0
        found = list[Request]()
        while self._seen < count:
            text = self.get(f"request/{self._seen + 1}")
            if text is None and self._skips < _SKIPS:  # it may follow; its launcher may also be gone
                self._skips += 1
                break
            self._seen, self._skips = self._seen + 1, 0
            if text is not None:
                found.append(Request(self._seen, **json.loads(text)))
        return found

    def set_wait(self, value: dict[str, Any] | None) -> None:
        """Let node 0 know how long the ranks of this node wait, at every look while they wait for too long."""
        if self.node != 0 and (value is not None or self._has_wait):
            self._has_wait = value is not None
            self.set(f"wait/{self.node}", json.dumps(value))

    def waits(self) -> list[dict[str, Any]]:
        """The waits of the other nodes that are too long; one operation of the store per node."""
        keys = [f"{self._prefix}/wait/{node}" for node in range(self.nodes) if node != self.node]

        def read() -> list[bytes]:
            return [self._store.get(key) for key in keys if self._store.check([key])]

        return [value for text in self._call(read) or () if (value := json.loads(text)) is not None]

    def answer(self, number: int, value: object) -> None:
        """Answer a request."""
        self.set(f"answer/{number}/{self.node}", b64encode(zlib.compress(json.dumps(value).encode())).decode())

    def answers(self, number: int, seconds: float) -> dict[int, Any]:
        """The answers of the other launchers by node; waits for all of them for at most this long."""
        deadline, found = time.monotonic() + seconds, dict[int, Any]()
        missing = [node for node in range(self.nodes) if node != self.node]
        while missing and time.monotonic() < deadline:
            for node in list(missing):
                if (text := self.get(f"answer/{number}/{node}")) is not None:
                    found[node] = json.loads(zlib.decompress(b64decode(text)))
                    missing.remove(node)
                    self.delete(f"answer/{number}/{node}")  # of up to megabytes
            if missing:
                time.sleep(0.2)
        return found

    def wait_for_ends(self, seconds: float) -> None:
        """Wait until the other launchers have read a request to end, for at most this long; one may host the store."""
        deadline, missing = time.monotonic() + seconds, set(self.read_nodes()) - {self.node}
        while missing and time.monotonic() < deadline:
            missing = {node for node in missing if self.get(f"ended/{node}") is None}
            time.sleep(0.1)

    def get(self, key: str) -> str | None:
        """A value; None if it is not set, or if the store does not answer."""
        key = f"{self._prefix}/{key}"
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        """Set a value, if the store answers."""
        key = f"{self._prefix}/{key}"
        self._call(lambda: self._store.set(key, value))

    def delete(self, key: str) -> None:
        """Delete a value, if the store answers and can do so."""
        key = f"{self._prefix}/{key}"
        self._call(lambda: self._store.delete_key(key))


@dataclass(frozen=True)
class LauncherInfo:
    """The launcher that answers requests in the folder of a run."""

    host: str
    pid: int
    started: float  # in seconds since boot
    namespace: str  # of process ids
    node: int
    main_host: str  # of the launcher of node 0, which answers
    has_ended: bool = False

    @classmethod
    def of_this_process(cls, node: int, main_host: str) -> "LauncherInfo":
        """The launcher that this process is."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, seconds_from_boot(pid), process_namespace(), node, main_host)

    @property
    def is_local(self) -> bool:
        """Whether its process id means a process of this machine."""
        return self.host == socket.gethostname() and self.namespace == process_namespace()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as this machine knows."""
        return not self.has_ended and (not self.is_local or process_runs(self.pid, self.started))


class HangFolder:
    """The folder `hang` of a run: reports, the launcher that writes them, requests of `samestep hang` and answers."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "hang"
        self._own: tuple[Path, LauncherInfo] | None = None

    def open(self, info: LauncherInfo) -> None:
        """Let `samestep hang` find the launcher; raises OSError if the folder cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        if info.node == 0 and self._own is None:  # left by an earlier run; nodes may share the folder
            for left in (*self.path.glob("request-*"), *self.path.glob("answer-*")):
                left.unlink(missing_ok=True)
        name = "launcher.json" if info.node == 0 else f"launcher-{info.node}.json"
        if self._own is not None and self._own[0].name != name:  # the nodes have other numbers after a restart
            self._own[0].unlink(missing_ok=True)
        self._own = self.path / name, info
        write_atomically(self.path / name, json.dumps(asdict(info)))

    def close(self) -> None:
        """Let `samestep hang` know that the launcher has ended."""
        if self._own is not None:
            path, info = self._own
            with suppress(OSError):  # the user has removed the folder, or the disk is full
                write_atomically(path, json.dumps(asdict(replace(info, has_ended=True))))

    def launcher(self) -> LauncherInfo | None:
        """The launcher of the run, or of the last one in this folder; that of node 0 if there are several."""
        path = next(iter(sorted(self.path.glob("launcher*.json"), key=lambda path: (len(path.name), path.name))), None)
        if path is None:
            return None
        try:
            return LauncherInfo(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise LaunchError(
                f"{path} cannot be read ({error}): check its permissions, and that both machines have the same version "
                "of samestep"
            ) from error

    def write_report(self, attempt: int, text: str, value: object) -> Path:
        """Write the next report of an attempt as text and as JSON; returns the path of the text."""
        number = 1 + sum(1 for _ in self.path.glob(f"report-{attempt}-*.txt"))
        path = self.path / f"report-{attempt}-{number}.txt"
        write_atomically(path, text)
        write_atomically(path.with_suffix(".json"), json.dumps(value, indent=1))
        return path

    def requests(self) -> Sequence[str]:
        """Names of requests that wait for an answer."""
        return [path.name.removeprefix("request-") for path in self.path.glob("request-*")]

    def answer(self, name: str, value: object) -> None:
        """Answer a request, unless its sender has given up."""
        request = self.path / f"request-{name}"
        if request.exists():
            with suppress(OSError):  # a full disk: the user reads that there is no answer
                write_atomically(self.path / f"answer-{name}", json.dumps(value))
            request.unlink(missing_ok=True)

    def ask(self, seconds: float, is_alive: Callable[[], bool]) -> dict[str, Any] | None:
        """Request a report and wait for the answer; None if there is none within this time, or the launcher ends."""
        name = uuid4().hex
        request, answer = self.path / f"request-{name}", self.path / f"answer-{name}"
        request.touch()
        deadline = time.monotonic() + seconds
        try:
            while not answer.exists():
                if time.monotonic() > deadline or not is_alive():
                    return None
                time.sleep(0.1)
            return json.loads(answer.read_text())
        finally:
            request.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
