"""Run the script in a world of one or several ranks, under the recorder, and end it if it hangs."""

import ast
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from samestep.environment.world import read_environ
from samestep.errors import LaunchError
from samestep.verify.recorder.recorder import MARKER, VARIABLE, RecorderSettings
from samestep.verify.scratch import find_root, link_beside, linked_files, make_mirror

_START_SECONDS: Final = 120.0  # in which an interpreter has imported torch
_STUCK_SECONDS: Final = 4.0  # after which ranks that wait for each other are not given more time
_IDLE_SECONDS: Final = 30.0  # after which ranks that wait in the same call are not given more time
_IDLE_SHARE: Final = 0.5  # of the time of a world that a rank may do nothing while others wait for it
_WORK_SECONDS: Final = 1.0  # between two looks at the CPU time of a rank
_WORK_SHARE: Final = 0.02  # of the CPU, also on a busy machine; a rank that waits needs less
_GRACE_SECONDS: Final = 3.0  # that the other ranks get to end after one has failed
_POLL_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 10.0  # in which a killed rank is gone
_CLOSE_SECONDS: Final = 1.0
_INTERPRETERS: Final = 2
_FRAMEWORKS: Final = {  # that take long to import
    "lightning": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "torchmetrics": "torchmetrics",
    "samestep": "samestep.training.run",  # it must see the functions of torch as they are
}


@dataclass(frozen=True)
class Target:
    """What to run: a script or a module, and its arguments."""

    name: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    folder: Path = field(default_factory=Path.cwd)


@dataclass
class WorldRun:
    """How a world has ended; its traces are in `settings.folder`."""

    settings: RecorderSettings
    seconds: float = 0.0
    exit_codes: dict[int, int] = field(default_factory=dict[int, int])  # of ranks that verify did not end
    hung: bool = False
    timed_out: bool = False
    outputs: dict[int, str] = field(default_factory=dict[int, str])
    changed: list[str] = field(default_factory=list[str])  # files of the user that the script has written to

    @property
    def needs_spawn(self) -> bool:
        """Whether the script starts its ranks by itself."""
        return not self.settings.spawns and Path(self.settings.folder, MARKER).exists()

    @property
    def was_ended(self) -> bool:
        """Whether verify has ended processes that still ran."""
        return len(self.exit_codes) < len(self.outputs)


class Interpreters:
    """Python processes that have imported torch and fork ranks; use it in a `with` statement.

    You can use the same interpreters for several scripts, which saves the import of torch for all but the first.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._processes = [_Interpreter(number, device) for number in range(_INTERPRETERS)]

    def __enter__(self) -> "Interpreters":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the interpreters."""
        for each in self._processes:
            each.close()

    def wait_until_ready(self) -> None:
        """Wait for the import of torch."""
        for each in self._processes:
            each.wait_until_ready()

    def start(self, requests: Sequence[dict[str, Any]]) -> list[int]:
        """Fork a process for each rank; returns their process ids.

        The interpreters import what the script needs at the same time, so that no rank waits long for another.
        """
        processes = [self._processes[rank % _INTERPRETERS] for rank in range(len(requests))]
        numbers = [process.request(each) for process, each in zip(processes, requests, strict=True)]
        return [process.started(number) for process, number in zip(processes, numbers, strict=True)]

    def end_ranks(self) -> None:
        """Kill everything that the interpreters have forked, also what has left the session of its rank."""
        for each in self._processes:
            each.end_ranks()

    def ended(self) -> dict[int, int]:
        """Exit codes by process id, of those that ended since the last call."""
        found = dict[int, int]()
        for each in self._processes:
            found |= each.ended()
        return found


class _Interpreter:
    def __init__(self, number: int, device: str) -> None:
        environment = read_environ()
        environment |= {
            "PYTHONHASHSEED": str(number + 1),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
            "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than all steps
        }
        if os.getloadavg()[0] > (os.cpu_count() or 1):  # threads that spin would take the cores that others need
            environment.setdefault("OMP_WAIT_POLICY", "passive")
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.pop("PYTHONSTARTUP", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from samestep.verify.recorder.fork_server import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        self._pending = b""
        self._answers: list[dict[str, Any]] = []
        self._requests = 0
        self.is_ready = False

    def close(self) -> None:
        """End the process and everything that it has forked."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()  # the process then ends what it has forked, and itself
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it still imports torch
            self._process.kill()
            self._process.wait()

    def end_ranks(self) -> None:
        """Kill what this process has forked; it is the parent of what its ranks leave behind."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    child.kill()

    def wait_until_ready(self) -> None:
        """Wait until the process has imported torch."""
        if not self.is_ready:
            self._take(lambda answer: "ready" in answer, _START_SECONDS)
            self.is_ready = True

    def request(self, request: dict[str, Any]) -> int:
        """Request a fork; returns the number of the request."""
        self.wait_until_ready()
        assert self._process.stdin
        self._requests += 1
        self._process.stdin.write(json.dumps({**request, "id": self._requests}).encode() + b"\n")
        self._process.stdin.flush()
        return self._requests

    def started(self, number: int) -> int:
        """Wait for the fork of a request; returns its process id."""
        return self._take(lambda answer: answer.get("id") == number, _START_SECONDS)["started"]

    def ended(self) -> dict[int, int]:
        """Exit codes by process id, of forks that ended since the last call."""
        self._read(0.0)
        found = {answer["ended"]: answer["code"] for answer in self._answers if "ended" in answer}
        self._answers = [answer for answer in self._answers if "ended" not in answer]
        return found

    def _take(self, matches: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            for answer in self._answers:
                if matches(answer):
                    self._answers.remove(answer)
                    return answer
            if time.monotonic() > deadline or not self._read(max(0.0, deadline - time.monotonic())):
                raise LaunchError("a Python process that imports torch could not be started: see its error above")

    def _read(self, seconds: float) -> bool:
        """Read answers that have arrived; returns False if the process has ended."""
        assert self._process.stdout
        file = self._process.stdout.fileno()
        if not select.select([file], [], [], seconds)[0]:
            return True
        data = os.read(file, 2**20)
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._answers += [json.loads(line) for line in lines]
        return bool(data)


@dataclass(frozen=True)
class Progress:
    """What a world is doing, for the display."""

    world: str
    size: int
    step: int


def run_world(
    interpreters: Interpreters,
    target: Target,
    settings: RecorderSettings,
    seconds: float,
    report: Callable[[Progress], None],
) -> WorldRun:
    """Run the script on the ranks of one world until they have ended; ranks that hang are ended."""
    folder = Path(settings.folder)
    folder.mkdir(parents=True)
    Path(settings.states).mkdir(parents=True, exist_ok=True)
    root = find_root(target.folder)
    tree = folder / ("files" if root == target.folder else "tree")
    mirror = link_beside(root, target.folder, tree, folder.parent)
    make_mirror(target.folder, mirror, folder.parent)
    if mirror != tree:
        (folder / "files").symlink_to(mirror)
    linked = dict(linked_files(tree))
    settings = replace(settings, mirror=(str(tree), str(root)), port=_free_port())
    settings.save(folder / "settings.json")
    run = WorldRun(settings)
    start = time.monotonic()
    ranks = range(1 if settings.spawns else settings.size)
    watch = _Watch(settings, max(_IDLE_SECONDS, _IDLE_SHARE * seconds))
    try:
        started = interpreters.start([_request(target, settings, rank, folder) for rank in ranks])
        watch.processes = dict(zip(started, ranks, strict=True))
        watch.wait(interpreters, run, start + seconds, report)
    finally:
        watch.end(interpreters, run)
    run.seconds = time.monotonic() - start
    run.changed = [str(path) for path, before in linked.items() if _status(path) != before]
    for rank in ranks:
        run.outputs[rank] = (folder / f"rank-{rank}.log").read_text(errors="replace")[-20_000:]
    return run


def _status(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _free_port() -> int:
    """A port for scripts that open a store themselves; groups of torch use a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _request(target: Target, settings: RecorderSettings, rank: int, folder: Path) -> dict[str, Any]:
    tree, root = map(Path, settings.mirror)
    name = target.name
    if not target.is_module:
        path = Path(os.path.abspath(name))  # noqa: PTH100 - without resolving links
        with suppress(ValueError):
            name = str(tree / path.relative_to(root))
    return {
        "rank": None if settings.spawns else rank,
        "target": name,
        "is_module": target.is_module,
        "arguments": list(target.arguments),
        "folder": str(tree / target.folder.relative_to(root)),
        "output": str(folder / f"rank-{rank}.log"),
        "environment": _environment(settings, rank, folder),
        "parent": os.getpid(),
        "imports": _imports(target),
    }


def _imports(target: Target) -> list[str]:
    """The frameworks that a script imports: an interpreter imports them once, before it forks."""
    if target.is_module:
        return []
    with suppress(OSError, SyntaxError, ValueError):
        nodes = list(ast.walk(ast.parse(Path(target.name).read_bytes())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        roots = {name.split(".")[0] for name in names}
        own = ["samestep.lightning"] if any(name.startswith("samestep.lightning") for name in names) else []
        return [*(module for root, module in _FRAMEWORKS.items() if root in roots), *own]
    return []


def _environment(settings: RecorderSettings, rank: int, folder: Path) -> dict[str, str]:
    environment = read_environ()
    local = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(settings.size),
    }
    if settings.world != "nodes":
        local = {
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(settings.size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        }  # fmt: skip
    environment |= {
        VARIABLE: str(folder / "settings.json"),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        "TORCH_COMPILE_DISABLE": "1",
        "WANDB_MODE": "disabled",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }
    if settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not settings.spawns:
        environment |= {
            "RANK": str(rank), "WORLD_SIZE": str(settings.size), **local, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(settings.port), "TORCHELASTIC_RUN_ID": "verify", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(settings.size),
        }  # fmt: skip
    return environment


class _Watch:
    """Follows the ranks of a world until all have ended, or cannot end any more."""

    def __init__(self, settings: RecorderSettings, idle_seconds: float) -> None:
        self._settings, self._idle_seconds = settings, idle_seconds
        self.processes = dict[int, int]()
        """The ranks by process id."""
        self._tails = dict[Path, _Tail]()
        self._failed_since: float | None = None

    def wait(
        self, interpreters: Interpreters, run: WorldRun, deadline: float, report: Callable[[Progress], None]
    ) -> None:
        """Wait until all ranks have ended, one has failed for a while, or those that are left wait for each other."""
        while len(run.exit_codes) < len(self.processes):
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            self.collect(interpreters, run)
            tails = self._read()
            report(Progress(self._settings.world, self._settings.size, max((tail.step for tail in tails), default=0)))
            if run.needs_spawn:
                return
            if now > deadline:
                run.timed_out = True
                return
            if any(run.exit_codes.values()):
                self._failed_since = self._failed_since or now
                if self._is_over(tails, now):
                    return
            if self._is_stuck(tails, run, now):
                run.hung = True
                return

    def collect(self, interpreters: Interpreters, run: WorldRun) -> None:
        """Note the exit codes of ranks that have ended."""
        for process, code in interpreters.ended().items():
            if process in self.processes:
                run.exit_codes[self.processes[process]] = code

    def end(self, interpreters: Interpreters, run: WorldRun) -> None:
        """End all ranks and what they have started, and wait until they are gone; these get no exit code."""
        self.collect(interpreters, run)
        live = {process for process, rank in self.processes.items() if rank not in run.exit_codes}
        deadline = time.monotonic() + _KILL_SECONDS
        interpreters.end_ranks()  # also children of ranks that have ended
        while live and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            live -= interpreters.ended().keys()

    def _read(self) -> list["_Tail"]:
        for path in Path(self._settings.folder).glob("*.jsonl"):
            self._tails.setdefault(path, _Tail(path)).read()
        return list(self._tails.values())

    def _is_over(self, tails: Sequence["_Tail"], now: float) -> bool:
        """Whether the ranks that are left have had time to end after another has failed; those that work get more."""
        for tail in tails:
            tail.note_work(now)
        failed = self._failed_since or now
        last = max([failed, *(tail.changed for tail in tails if not tail.ended)])
        return now - last > _GRACE_SECONDS or now - failed > _IDLE_SECONDS

    def _is_stuck(self, tails: Sequence["_Tail"], run: WorldRun, now: float) -> bool:
        """Whether all ranks that live wait for others, or some do while the others have done nothing for long.

        Ranks that wait in the same call get more time: a large tensor on a busy machine is slow.
        """
        live = [tail for tail in tails if not tail.ended]
        if self._settings.spawns and any(tail.has_joined for tail in live):  # who started the ranks waits for their end
            live = [tail for tail in live if tail.has_joined or tail.process not in self.processes]
        for tail in live:
            tail.note_work(now)
        waiting = [tail for tail in live if tail.waits]
        if not waiting:
            return False
        idle = now - max(tail.changed for tail in live)
        if len(waiting) < len(live):
            return idle > self._idle_seconds
        is_same = len(live) == self._settings.size and len({tail.call for tail in live}) == 1
        return idle > (_IDLE_SECONDS if is_same else _STUCK_SECONDS)


class _Tail:
    """The end of a trace: the step of the rank, and whether it waits for others."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self.step, self.changed = 0, time.monotonic()
        self.waits = self.ended = self.has_joined = False
        self.process = 0
        self.call = ""  # the last one that waits for others, with its number
        self._calls = 0
        self._process: psutil.Process | None = None
        self._looked, self._worked = self.changed, 0.0  # when the CPU time was read last, and what it was

    def note_work(self, now: float) -> None:
        """Note that the rank computes, by the CPU time of its process and of its data workers."""
        if self._process is None or now - max(self.changed, self._looked) < _WORK_SECONDS:
            return
        worked = 0.0
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for process in (self._process, *self._process.children(recursive=True)):
                times = process.cpu_times()
                worked += times.user + times.system
        if worked - self._worked > _WORK_SHARE * (now - self._looked):
            self.changed = now
        self._looked, self._worked = now, worked

    def read(self) -> None:
        """Read what was added."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        self._position += sum(len(line) + 1 for line in lines)
        for event in map(json.loads, lines):
            self.changed, self.step = time.monotonic(), event["s"]
            kind = event["k"]
            self.has_joined = self.has_joined or (kind == "init" and event["state"] == "end")
            if kind == "start":
                self.process = event["pid"]
                with suppress(psutil.NoSuchProcess):
                    self._process = psutil.Process(event["pid"])
            self.ended = self.ended or kind == "end"
            if kind in ("collective", "backward", "call", "wrap") or (kind == "init" and event["state"] == "start"):
                self.waits = True
                self._calls += 1
                self.call = f"{self._calls} {kind} {event.get('name')} {event.get('shapes')}"
            elif kind != "code":
                self.waits = False
