"""What the launcher of a node knows about its ranks: it asks their probes, their processes and the kernel.

A rank that is stopped, does not answer or has ended is a result, never an exception. Everything that could wait for a
file system or a driver runs in a thread that the caller does not wait for.
"""

import functools
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import psutil

from samestep.environment.hardware import count_oom_kills
from samestep.hang import rank_probe
from samestep.hang.evidence import Frame, ProcessInfo, Progress, RankEvidence, read_collective
from samestep.hang.process_stacks import StackFile, Stacks, absolute_path, open_files, read_status

FOLDER: Final = "SAMESTEP_HANG_FOLDER"
"""The variable that tells the probes where to answer; also in startup/sitecustomize.py."""

_FAULTHANDLER: Final = "PYTHONFAULTHANDLER"
_STARTUP: Final = Path(__file__).parent / "startup"
_RECORDER_SIZES: Final = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # torch warns about the older name
_RECORDED: Final = "2000"  # collectives
_LONGEST_FOLDER: Final = 80  # characters: a socket's path may have 107
_ANSWER_SECONDS: Final = 1.6, 0.8  # at most, for the first and the second request
_STACK_SECONDS, _FACT_SECONDS = 0.8, 2.5  # at most, while evidence is collected
_WINDOW_SECONDS: Final = 0.5  # at least, in which CPU time is measured
_POLL_SECONDS: Final = 0.02
_TAIL_BYTES, _TAIL_LINES = 16384, 150  # a crash below FSDP prints 100 frames after its message
_SWAPPED_BYTES, _MAJOR_FAULTS = 10 * 2**20, 20  # swapped out, and faults per second: such a process is swapping
_FULL_BYTES: Final = 1 << 20
_COMMAND_LETTERS: Final = 300
_STATES: Final = {
    psutil.STATUS_RUNNING: "running", psutil.STATUS_DISK_SLEEP: "disk", psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped", psutil.STATUS_ZOMBIE: "zombie", psutil.STATUS_DEAD: "gone",
}  # fmt: skip
_T = TypeVar("_T")
_Answer = dict[str, Any]


class NodeProbe:
    """Asks the ranks of this node where they are.

    >>> probe = NodeProbe()
    >>> environ = probe.variables({"PATH": "/usr/bin"})  # for the ranks
    >>> probe.progress(1)  # process 1 is not a rank
    >>> probe.close()
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Create `folder`, which has a short path, or one in the temporary directory."""
        self.folder = folder if folder is not None else _create_folder()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._oom_kills = count_oom_kills()
        self._starters = dict[int, int]()  # of processes with a probe: the rank that has started it, or 0
        self._own_handlers = set[int]()  # processes whose script handles rank_probe.SIGNAL itself
        self.errors = dict[int, str]()  # why the probes of ranks could not read their collectives at the last request

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to `environ` for the ranks; none replaces one that the user has set."""
        others = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder != str(_STARTUP)]
        paths = os.pathsep.join([str(_STARTUP), *(others if any(others) else ())])
        sizes = {} if any(name in environ for name in _RECORDER_SIZES) else {_RECORDER_SIZES[0]: _RECORDED}
        crashes = {} if _FAULTHANDLER in environ else {_FAULTHANDLER: "1"}  # the line of a rank that gloo aborts
        return {"PYTHONPATH": paths, FOLDER: str(self.folder), **sizes, **crashes}

    def progress(self, pid: int, seconds: float = 1.0) -> Progress | None:
        """How far a rank is; None if it does not answer within `seconds`, or does not have the probe."""
        return self.progress_of([pid], seconds)[pid]

    def progress_of(self, pids: Iterable[int], seconds: float = 1.0) -> dict[int, Progress | None]:
        """How far several ranks are, asked at the same time.

        If a rank calls no collective itself, as with mp.spawn, this is the progress of the child that waits longest.
        """
        requested = list(pids)
        starters = self._find_starters(requested)
        answers = self._ask(dict.fromkeys([*requested, *starters], "progress"), seconds)
        for pid, answer in answers.items():
            if not answer.get("signal_is_free", True):
                self._own_handlers.add(pid)
        self.errors = {starters.get(pid, pid): answer["error"] for pid, answer in answers.items() if "error" in answer}
        found = {pid: _read_progress(answers.get(pid)) for pid in requested}
        for rank in {rank for rank in starters.values() if (own := found[rank]) is not None and not own.calls}:
            children = [_read_progress(answers.get(child)) for child, parent in starters.items() if parent == rank]
            if known := [each for each in children if each is not None and each.calls]:
                longest = max(known, key=lambda each: each.waiting)
                found[rank] = replace(longest, calls=sum(each.calls for each in known))
        return found

    def _find_starters(self, ranks: list[int]) -> dict[int, int]:
        """The rank of each process with a probe that a rank has started; data workers, which are forked, have none."""
        others = {int(path.stem) for path in self.folder.glob("*.sock")}.difference(ranks)
        for pid in others - self._starters.keys():
            with suppress(psutil.Error):  # it has ended
                above = [parent.pid for parent in psutil.Process(pid).parents()]
                self._starters[pid] = next((rank for rank in ranks if rank in above), 0)
        return {pid: self._starters[pid] for pid in others if self._starters.get(pid) in ranks}

    def collect(
        self, pids: Mapping[int, int], logs: Mapping[int, Path], exit_codes: Mapping[int, int] | None = None
    ) -> list[RankEvidence]:
        """All that is known about each rank, within about 3 seconds.

        `pids` are the process ids by rank, also of ranks that have ended, `logs` their log files and `exit_codes` the
        exit codes of those that have ended (negative for a signal), both by rank.
        """
        ended = dict(exit_codes or {})
        running = {rank: pid for rank, pid in pids.items() if rank not in ended}
        began = time.monotonic()
        gpus = _Task(lambda: read_gpu_percent(list(running.values())), dict[int, float]())
        tails = _Task(lambda: {rank: read_tail(path) for rank, path in logs.items()}, dict[int, list[str]]())
        disks = _Task(lambda: _find_full_disks(running, logs), dict[int, str]())
        processes = _Processes(running.values())
        _Task(processes.begin, None).wait(_FACT_SECONDS)
        able = [pid for pid in processes.all if not processes.is_stopped(pid)]
        answers = self._ask_twice(able, "evidence")
        stacks = {pid: _read_answered_stacks(answer) for pid, answer in answers.items() if "stacks" in answer}
        stacks |= self._signal_for_stacks([pid for pid in processes.all if pid not in stacks], processes)
        time.sleep(max(0.0, began + _WINDOW_SECONDS - time.monotonic()))
        _Task(processes.finish, None).wait(_FACT_SECONDS)
        for task in (gpus, tails, disks):
            task.wait(began + _FACT_SECONDS - time.monotonic())
        return [
            RankEvidence(
                rank=rank,
                node=socket.gethostname(),
                process=processes.describe(pid, stacks) if rank in running else ProcessInfo(pid, "gone"),
                children=[processes.describe(child, stacks) for child in processes.children.get(pid, ())],
                collected=time.time(),
                exit_code=ended.get(rank, processes.exit_codes.get(pid)),
                last_lines=tails.value.get(rank, []),
                gpu_percent=gpus.value.get(pid),
                full_disk=disks.value.get(rank, ""),
                oom_kills=max(0, count_oom_kills() - self._oom_kills),
                **_choose_answer([answers.get(each, {}) for each in (pid, *processes.children.get(pid, ()))]),
            )
            for rank, pid in sorted(pids.items())
        ]

    def end(self, pid: int, seconds: float = 2.0, exit_code: int = 1) -> bool:
        """Ask a rank to flush its files for up to `seconds` and to exit; returns whether it has agreed."""
        return pid in self._ask({pid: f"end {seconds} {exit_code}"}, 1.0)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask_twice(self, pids: Iterable[int], request: str) -> dict[int, _Answer]:
        """The answers; a process that misses the first request is most likely only slow."""
        answers = dict[int, _Answer]()
        for seconds in _ANSWER_SECONDS:
            answers |= self._ask({pid: request for pid in pids if pid not in answers}, seconds)
        return answers

    def _ask(self, requests: Mapping[int, str], seconds: float) -> dict[int, _Answer]:
        """The answers of the processes that answer within `seconds`."""
        answers = dict[int, _Answer]()
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for pid, request in requests.items():
                if (connection := self._connect(pid, request)) is not None:
                    selector.register(connection, selectors.EVENT_READ, (pid, bytearray()))
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    pid, received = key.data
                    if not _receive(key.fileobj, received):
                        selector.unregister(key.fileobj)
                        _close(key.fileobj)
                        with suppress(ValueError):  # the process has ended, or its Python ends
                            answers[pid] = json.loads(received)
            for key in list(selector.get_map().values()):
                _close(key.fileobj)
        return answers

    def _connect(self, pid: int, request: str) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(str(self.folder / f"{pid}.sock"))
            connection.sendall(request.encode())
        except OSError:  # the process does not have the probe, has ended, or has not answered earlier requests
            connection.close()
            return None
        return connection

    def _signal_for_stacks(self, pids: Iterable[int], processes: "_Processes") -> dict[int, Stacks]:
        """The stacks that faulthandler writes at a signal, of processes that do not answer."""
        files = dict[int, StackFile]()
        for pid in pids:
            if processes.ancestors(pid).isdisjoint(self._own_handlers) and not processes.is_stopped(pid):
                with suppress(OSError, ValueError):  # it has ended, or does not have the probe
                    files[pid] = StackFile(pid)
        for pid in files:
            with suppress(OSError):  # it has ended
                os.kill(pid, rank_probe.SIGNAL)
        found = dict[int, Stacks]()
        deadline = time.monotonic() + _STACK_SECONDS
        while files and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for pid, file in list(files.items()):
                if file.read():
                    found[pid] = file.stacks
                    del files[pid]
        return found | {pid: file.stacks for pid, file in files.items() if file.stacks}


def _read_answered_stacks(answer: _Answer) -> Stacks:
    folder = answer.get("start_folder", "")
    return {name: _read_frames(stack, folder) for name, stack in answer["stacks"].items()}


def _read_frames(stack: list[tuple[str, int, str]], folder: str) -> list[Frame]:
    return [Frame(absolute_path(file, folder), line or 0, function) for file, line, function in stack]


def _read_progress(answer: _Answer | None) -> Progress | None:
    if answer is None or "calls" not in answer:
        return None
    found = Progress(**{each.name: answer[each.name] for each in fields(Progress)})
    return replace(found, stack=_read_frames(answer["stack"], answer["start_folder"]))


def _choose_answer(answers: list[_Answer]) -> dict[str, Any]:
    """Collectives of a rank, or of a process that it has started if it only starts the training."""
    answered = [answer for answer in answers if "collectives" in answer]
    if not answered:
        return {"collectives": None, "error": next((answer["error"] for answer in answers if "error" in answer), "")}
    answer = next((answer for answer in answered if answer["collectives"]), answered[0])
    folder = answer["start_folder"]
    collectives = [
        read_collective(each | {"stack": [asdict(frame) for frame in _read_frames(each["stack"], folder)]})
        for each in answer["collectives"]
    ]
    return {"collectives": collectives, "step_seconds": answer["interval"]}


class _Processes:
    """The processes of the ranks and of their children: what each does while the evidence is collected.

    `begin` and `finish` may wait for the kernel, for example for a process on a hung network drive. What they have
    found until then is valid.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._ranks = list(pids)
        self.children = dict[int, list[int]]()  # of each rank, and their children
        self.exit_codes = dict[int, int]()
        self._parents = dict[int, int]()
        self._first = dict[int, _Sample]()
        self._info = dict[int, ProcessInfo]()

    @property
    def all(self) -> list[int]:
        """The ranks and their descendants."""
        return [*self._ranks, *(child for pid in self._ranks for child in self.children.get(pid, ()))]

    def begin(self) -> None:
        """Find the children, and take the first sample of all."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                self._parents[process.pid] = process.ppid()
        below = dict[int, list[int]]()
        for pid, parent in self._parents.items():
            below.setdefault(parent, []).append(pid)
        for rank in self._ranks:
            found = below.get(rank, [])[:]
            for pid in found:  # which grows
                found += below.get(pid, [])
            self.children[rank] = found
        for pid in self.all:
            self._first[pid] = _Sample(pid)

    def finish(self) -> None:
        """Take the second sample."""
        for pid in self.all:
            before, now = self._first.get(pid), _Sample(pid)
            window = now.time - before.time if before is not None else 0.0
            faults = now.major_faults - before.major_faults if before is not None else 0
            self._info[pid] = ProcessInfo(
                pid=pid,
                state=_combine_states(before.state if before is not None else "sleeping", now.state),
                command=now.command or (before.command if before is not None else ""),
                cpu_seconds=max(0.0, now.cpu_seconds - before.cpu_seconds) if before is not None else 0.0,
                window=window,
                is_swapping=now.swapped > _SWAPPED_BYTES and faults > _MAJOR_FAULTS * window,
                waits_for=now.waits_for,
                name=now.name or (before.name if before is not None else ""),
                parent=self._parents.get(pid, 0),
                exit_code=now.exit_code,
            )
            if now.exit_code is not None:
                self.exit_codes[pid] = now.exit_code

    def describe(self, pid: int, stacks: Mapping[int, Stacks]) -> ProcessInfo:
        """What is known about a process."""
        first = self._first.get(pid)
        known = self._info.get(pid) or ProcessInfo(pid, _combine_states("sleeping", first.state if first else "gone"))
        return replace(known, stacks=stacks.get(pid, {}))

    def ancestors(self, pid: int) -> set[int]:
        """The process itself, its parent, and so on."""
        found = set[int]()
        while pid not in found and pid > 0:
            found.add(pid)
            pid = self._parents.get(pid, 0)
        return found

    def is_stopped(self, pid: int) -> bool:
        """Whether the process could not handle a signal now."""
        return pid in self._first and self._first[pid].state in ("stopped", "zombie", "gone")


class _Sample:
    """A process at a moment; one that has ended has the state "gone"."""

    def __init__(self, pid: int) -> None:
        self.time, self.state, self.command, self.waits_for = time.monotonic(), "gone", "", ""
        self.name = ""
        self.cpu_seconds, self.major_faults, self.swapped = 0.0, 0, 0
        self.exit_code: int | None = None
        with suppress(psutil.Error, OSError, ValueError, IndexError, KeyError):
            process = psutil.Process(pid)
            self.state, self.name = _STATES.get(process.status(), "sleeping"), process.name()
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if self.state == "zombie":
                self.exit_code = os.waitstatus_to_exitcode(int(values[49]))
                return
            self.major_faults = int(values[9])
            used = process.cpu_times()
            self.cpu_seconds = used.user + used.system
            self.swapped = 1024 * int(read_status(pid)["VmSwap"].split()[0])
            self.command = " ".join(process.cmdline())[:_COMMAND_LETTERS]
            self.waits_for = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")


def _combine_states(before: str, now: str) -> str:
    """The state of a process in two samples: what it is in by chance in one of them counts as sleeping.

    `py-spy dump`, for example, stops a process for a moment.

    >>> _combine_states("disk", "disk"), _combine_states("disk", "sleeping"), _combine_states("running", "stopped")
    ('disk', 'sleeping', 'sleeping')
    """
    if before == now or now in ("zombie", "gone"):
        return now
    return "sleeping" if {"sleeping", "stopped"} & {before, now} else now


class _Task(Generic[_T]):
    """Runs a function in a thread, whose result counts only if it is there in time."""

    def __init__(self, function: Callable[[], _T], default: _T) -> None:
        self.value = default
        self._function = function
        self._thread = threading.Thread(target=self._run, name="samestep hang evidence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.value = self._function()

    def wait(self, seconds: float) -> None:
        """Wait until the result is there, or for this long."""
        self._thread.join(max(0.0, seconds))


def read_tail(path: Path) -> list[str]:
    """The last lines of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def _find_full_disks(pids: Mapping[int, int], logs: Mapping[int, Path]) -> dict[int, str]:
    """The mount point of a full file system that a rank writes to, by rank."""
    found = dict[int, str]()
    usage = dict[Path, bool]()
    for rank, pid in pids.items():
        for folder in {*_written_folders(pid), *([logs[rank].parent] if rank in logs else ())}:
            if folder not in usage:
                usage[folder] = _is_full(folder)
            if usage[folder]:
                found[rank] = _mount_point(folder)
    return found


def _written_folders(pid: int) -> Iterator[Path]:
    """The folders of the files that a process has opened to write, and its current folder; not of devices or memory."""
    with suppress(OSError):
        yield Path(f"/proc/{pid}/cwd").readlink()
        for file in open_files(pid):
            with suppress(OSError, ValueError, IndexError):  # closed meanwhile
                info = Path(f"/proc/{pid}/fdinfo/{file.name}").read_text()
                path = file.readlink()
                if _is_on_disk(path) and int(info.split("flags:")[1].split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield path.parent


def _is_on_disk(path: Path) -> bool:
    """Whether an open file is in a file system: not a pipe, a device or memory, such as that for the stacks.

    >>> [_is_on_disk(Path(path)) for path in ("/memfd:a (deleted)", "pipe:[1]", "/dev/null", "/dev/shm/a", "/a")]
    [False, False, False, True, True]
    """
    is_memory, is_device = str(path).startswith("/memfd:"), path.is_relative_to("/dev")
    return path.is_absolute() and not is_memory and (not is_device or path.is_relative_to("/dev/shm"))


def _is_full(folder: Path) -> bool:
    try:
        usage = os.statvfs(folder)
    except OSError:  # deleted, or /dev/pts of another namespace
        return False
    is_image = usage.f_flag & os.ST_RDONLY  # which has no free blocks
    return usage.f_blocks > 0 and not is_image and usage.f_bavail * usage.f_frsize < _FULL_BYTES


def _mount_point(folder: Path) -> str:
    return str(next((each for each in (folder, *folder.parents) if each.is_mount()), folder))


def read_gpu_percent(pids: Iterable[int]) -> dict[int, float]:
    """The utilization of the GPU of each process, from nvidia-smi; a process without a GPU is omitted."""
    if shutil.which("nvidia-smi") is None:
        return {}
    queries = "--query-gpu=uuid,utilization.gpu", "--query-compute-apps=pid,gpu_uuid"
    texts = [_Task(functools.partial(_run_smi, query), "") for query in queries]
    for text in texts:
        text.wait(_FACT_SECONDS)
    return match_gpus(texts[0].value, texts[1].value, list(pids))


def match_gpus(gpus: str, users: str, pids: list[int]) -> dict[int, float]:
    r"""The utilization by process id, from lines of `uuid, percent` and of `process id, uuid`.

    In a container, nvidia-smi may know the processes by other ids. If there are as many processes as GPUs, they use
    them in this order.

    >>> match_gpus("GPU-a, 100\nGPU-b, 3", "17, GPU-b", [17]), match_gpus("GPU-a, 100\nGPU-b, 3", "", [17, 18])
    ({17: 3.0}, {17: 100.0, 18: 3.0})
    """
    percent = {uuid: float(value) for uuid, value in _cells(gpus) if value.isdecimal()}
    used = {int(pid): uuid for pid, uuid in _cells(users) if pid.isdecimal()}
    found = {pid: percent[used[pid]] for pid in pids if used.get(pid) in percent}
    if not found and len(percent) == len(pids):
        return dict(zip(pids, percent.values(), strict=True))
    return found


def _cells(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 2:
            yield cells[0], cells[1]


def _run_smi(query: str) -> str:
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_FACT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout


def _create_folder() -> Path:
    """A folder that only this user can open, with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="samestep-"))
    if len(str(folder)) <= _LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="samestep-", dir="/tmp"))


def _receive(connection: Any, received: bytearray) -> bool:
    """Read what has arrived; returns whether more may come."""
    try:
        part: bytes = connection.recv(1 << 20)
    except BlockingIOError:
        return True
    except OSError:
        return False
    received += part
    return bool(part)


def _close(connection: Any) -> None:
    connection.close()
