"""The probe inside of a Python process below `samestep run`: it answers the launcher where the process is.

A thread waits on a Unix socket and works only if the launcher asks. If native code holds the GIL, faulthandler still
writes the stacks when the launcher sends a signal; children that a process forks, such as data workers, have only this.
The stacks go to a file in memory that the launcher finds in /proc.

startup/sitecustomize.py loads this module by its file when Python starts, so it uses only what Python has loaded then
and few modules of C. It never imports torch: it looks at what the script has imported.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # these take longer to import than all else
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType
    from typing import Any, Final

    Answer = dict[str, Any]
else:
    ModuleType = type(sys)

SIGNAL: Final = 47  # a real-time signal that neither samestep nor torch uses
MEMORY_FILE: Final = "samestep-stacks"

# The private torch API that the probe uses; tests/ranks/test_torch_private.py fails if it vanishes.
RECORDERS: Final = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}  # of torch._C._distributed_c10d
WORLD: Final = "_world"  # of torch.distributed.distributed_c10d
WORLD_FIELDS: Final = ("pg_names", "pg_group_ranks")
GROUP_METHODS: Final = ("_device_types", "_get_backend")
INDUCTOR: Final = "_inductor"  # of torch, which imports it at the first use
BACKEND_METHODS: Final = ("_get_sequence_number_for_group", "options")

_LATEST: Final = 64  # collectives that an answer contains besides those that are pending
_FRAMES: Final = 200  # of each thread
_VERIFY_SECONDS: Final = 5.0  # a dump of the recorder takes up to 50 ms, so it must be worth it
_VERIFY_SHARE: Final = 0.3  # of the shortest timeout, if that is earlier
_REQUEST_SECONDS: Final = 2.0
_NO_SIGPIPE: Final = 0x4000  # MSG_NOSIGNAL: the launcher may have given up, and the script may want SIGPIPE to end it
_FORK_SECONDS: Final = 1.0
_GONE_SECONDS: Final = 2e-5  # between two looks whether a thread is gone
_SELECTORS: Final = "/selectors.py"  # in which asyncio's event loop waits
_TORCH_CALLS: Final = "torch/distributed/distributed_c10d.py"


def start(folder: str) -> None:
    """Start the probe of this process, which answers at a socket in `folder`; raises OSError if that does not exist."""
    global _probe
    os.stat(folder)  # noqa: PTH116 - the launcher may be gone
    _probe = _Probe(folder)


def is_running() -> bool:
    """Whether the launcher watches this process, so that nothing else needs to."""
    return _probe is not None and _probe.answers


def measures_waits(is_measured: bool) -> None:
    """Let the launcher know whether this process itself measures how long ranks wait, and names one that is slow."""
    global _is_measured
    _is_measured = is_measured


def at_end(function: Callable[[], object]) -> Callable[[], None]:
    """Call `function` in another thread before the launcher ends this process, which waits for it for a short time.

    Returns a function that undoes this.
    """
    _at_end.append(function)

    def remove() -> None:
        if function in _at_end:
            _at_end.remove(function)

    return remove


_probe: _Probe | None = None
_is_measured = False
_at_end: list[Callable[[], object]] = []


class _Probe:
    """The socket, the thread and the file of stacks of this process."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{os.getpid()}.sock"
        self._start_folder = os.getcwd()  # noqa: PTH109
        self._collectives = _CollectiveWatch()
        self._forks = _thread.allocate_lock()  # one fork at a time
        self._is_closed = False
        self._stack_file = _open_stack_file()
        self._main_thread = _thread.get_ident()
        if not _serves_multiprocessing():
            self._start_thread()
            atexit.register(self._close)  # first registered, so it runs last
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )

    def _start_thread(self) -> None:
        self._server: Any = None
        self._is_stopping = False
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        # Not a threading.Thread: scripts count those, and the interpreter waits for them.
        _thread.start_new_thread(self._serve, (self._ended,))

    def _stop_thread(self, seconds: float) -> bool:
        """Stop the thread and wait for it; returns whether it has ended."""
        self._is_stopping = True
        if self._server is not None:
            try:
                self._check_open()
                self._server.shutdown(2)  # the thread's accept then raises
            except OSError:  # the thread ends at the next request
                return False
        return self._ended.acquire(timeout=seconds)

    def _check_open(self) -> None:
        """Raise if the script has closed all of its files: the number of the socket may now be another file."""
        if os.fstat(self._server.fileno()).st_ino != self._inode:
            raise OSError("the socket is closed")

    def _before_fork(self) -> None:
        """Stop the thread: a process that forks should not have more threads than without samestep."""
        self._forks.acquire(timeout=_FORK_SECONDS)
        if self.answers and self._stop_thread(_FORK_SECONDS):
            self._wait_for_kernel(time.monotonic() + _FORK_SECONDS)

    def _wait_for_kernel(self, deadline: float) -> None:
        """Wait until the thread is gone also for the kernel: from Python 3.12 on, os.fork warns about those."""
        while time.monotonic() < deadline:
            try:
                os.stat(f"/proc/self/task/{self._native_id}")  # noqa: PTH116
            except OSError:  # it is gone
                return
            time.sleep(_GONE_SECONDS)

    def _after_fork(self) -> None:
        try:
            if self.answers:
                self._start_thread()
        except RuntimeError:  # there are too many threads: this process is without a probe from now on
            self._is_closed = True
        if self._forks.locked():
            self._forks.release()

    def _after_fork_in_child(self) -> None:
        """A data worker, for example. It has its own stacks, but answers no request."""
        self._forks = _thread.allocate_lock()
        self._is_closed = True
        self._main_thread = _thread.get_ident()
        _close_stack_file(*self._stack_file)
        self._stack_file = -1, -1
        if _signal_is_free():
            # Lightning sets the handlers of all signals to those that Python knows, which removes faulthandler's.
            faulthandler.unregister(SIGNAL)
            # Without its other threads: faulthandler reads their frames while they run, which can crash the process. A
            # rank gets the signal only if it does not answer, so that most likely none of its threads runs Python.
            self._stack_file = _open_stack_file(all_threads=False)

    @property
    def answers(self) -> bool:
        """Whether this process answers requests, unlike a child that it forks."""
        return not self._is_closed and hasattr(self, "_ended")

    def _close(self) -> None:
        """End the thread: if Python ends below a thread, the process may crash."""
        if not self._is_closed:
            self._stop_thread(_REQUEST_SECONDS)
            self._is_closed = True
            _unlink(self._path)

    def _serve(self, ended: Any) -> None:
        try:
            self._native_id = _thread.get_native_id()
            import _socket  # socket itself takes 5 ms to import

            _unlink(self._path)  # of an earlier process with this id, or of this one before a fork
            server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            try:
                server.bind(self._path)
                server.listen(8)
            except OSError:  # the launcher is gone
                server.close()
                raise
            self._server, self._inode = server, os.fstat(server.fileno()).st_ino
            while not self._is_stopping:
                self._check_open()
                self._answer(_socket.socket(fileno=server._accept()[0]))  # pyright: ignore
        except (OSError, ImportError):  # the thread stops, or this process is without a probe
            return
        finally:
            self._drop_server()
            ended.release()

    def _drop_server(self) -> None:
        try:
            self._check_open()
            self._server.close()
        except OSError:
            self._server.detach()  # closes nothing
        except AttributeError:  # it does not exist
            return

    def _answer(self, connection: Any) -> None:
        try:
            connection.settimeout(_REQUEST_SECONDS)
            name, *values = connection.recv(4096).decode().split()
            answer = _encode(self._reply(name))
            connection.sendall(answer, _NO_SIGPIPE)
            if name == "end":
                _end(*values)
        except (OSError, ValueError):  # the launcher has given up, or is gone
            return
        finally:
            connection.close()

    def _reply(self, name: str) -> Answer:
        answer: Answer = {"start_folder": self._start_folder, "signal_is_free": _signal_is_free()}
        try:
            if name == "evidence":
                answer["stacks"] = dict(self._stacks())
            answer |= self._collectives.progress(self._main_frame())
            if name == "progress":
                answer |= {"is_measured": _is_measured, "stack": _read_frames(self._main_frame())}
            if name == "evidence":
                answer["collectives"] = self._collectives.list(self._main_frame())
        except Exception as error:  # noqa: BLE001 - of another version of torch: its stacks are known
            answer["error"] = f"{type(error).__name__}: {error}"
        return answer

    def _main_frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main_thread)  # pyright: ignore[reportPrivateUsage]

    def _stacks(self) -> Iterator[tuple[str, list[list[Any]]]]:
        threads: dict[int, Any] = getattr(sys.modules.get("threading"), "_active", {})
        names = {thread: getattr(each, "name", "") for thread, each in list(threads.items())}
        names[self._main_thread] = "main"
        for thread, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
            if thread == self._main_thread:
                yield "main", [*_read_awaited_frames(frame), *_read_frames(frame)]
            elif thread != _thread.get_ident():
                yield f"{names.get(thread) or 'thread'} {thread:#x}", _read_frames(frame)


class _CollectiveWatch:
    """Follows the collectives of this process over the requests of the launcher."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], _GroupStatus] = {}
        self._verified: tuple[list[tuple[str, str, int, int]], Answer | None] = [], None
        self._main_wait: tuple[Any, float] = None, 0.0  # where the main thread waits, and since when
        self._calls, self._advanced = 0, time.monotonic()
        self._interval: float | None = None

    def progress(self, main: FrameType | None) -> Answer:
        """How long this process waits for others, in some 50 microseconds."""
        now, world = time.monotonic(), _World()
        calls = sum(group.calls for group in world.groups)
        if world.groups:
            self._update(now)
        self._measure_interval(now, calls)
        waiting, timeout = self._oldest_wait(now, world)
        call = _find_torch_call(main)
        is_pending = any(group.is_pending for group in self._groups.values()) and bool(world.groups)
        if not waiting and call is not None:
            waiting, timeout = self._wait_of_main_thread(now, call, calls), 0.0  # it may be that of any group, or none
        return {
            "calls": calls,
            "waiting": waiting,
            "timeout": timeout if waiting else 0.0,
            "is_waiting": is_pending or call is not None,
            "interval": self._interval,
        }

    def list(self, main: FrameType | None) -> list[Answer]:
        """The pending collectives and the latest ones, in the order of their calls."""
        world = _World()
        found = _read_collectives(world, with_stacks=True) if world.groups else []
        chosen = [each for index, each in enumerate(found) if each["is_pending"] or index >= len(found) - _LATEST]
        call, (_, since) = _find_torch_call(main), self._main_wait
        if call is None or not since or any(each["is_pending"] for each in chosen):
            return chosen
        return [*chosen, _unrecorded(call, time.time() - (time.monotonic() - since))]

    def _update(self, now: float) -> None:
        for backend, group, called, complete in _read_status():
            before = self._groups.get((backend, group))
            if before is None or not before.is_pending or before.complete != complete:
                self._groups[backend, group] = _GroupStatus(called, complete, now)
            else:
                self._groups[backend, group] = _GroupStatus(called, complete, before.since)

    def _measure_interval(self, now: float, calls: int) -> None:
        if calls > self._calls > 0:
            latest = (now - self._advanced) / (calls - self._calls)
            self._interval = latest if self._interval is None else 0.8 * self._interval + 0.2 * latest
        if calls != self._calls:
            self._calls, self._advanced = calls, now

    def _oldest_wait(self, now: float, world: _World) -> tuple[float, float]:
        """How long the oldest pending collective has waited, and its timeout.

        The status of a group is cheap, but counts no time, and groups that were destroyed keep theirs. Until the
        recorder is read, the timeout is that of the group with the shortest one.
        """
        pending = {key: group for key, group in self._groups.items() if group.is_pending and world.groups}
        waited = max((now - group.since for group in pending.values()), default=0.0)
        verify = min(_VERIFY_SECONDS, _VERIFY_SHARE * world.shortest_timeout or _VERIFY_SECONDS)
        if waited < verify:
            return waited, world.shortest_timeout
        state = [(*key, group.called, group.complete) for key, group in pending.items() if now - group.since >= verify]
        if state != self._verified[0]:
            found = (each for each in _read_collectives(world, with_stacks=False) if each["is_pending"])
            self._verified = state, next(found, None)
        oldest = self._verified[1]
        return (max(0.0, time.time() - oldest["called"]), oldest["timeout"]) if oldest is not None else (0.0, 0.0)

    def _wait_of_main_thread(self, now: float, call: FrameType, calls: int) -> float:
        """How long the main thread has been at the same call of torch.distributed, as far as requests have seen."""
        position = id(call), call.f_lasti, calls
        if position != self._main_wait[0]:
            self._main_wait = position, now
        return now - self._main_wait[1]


class _GroupStatus:
    """The last calls of a process group that were made and are complete, and since when it is so."""

    def __init__(self, called: int, complete: int, since: float) -> None:
        self.called, self.complete, self.since = called, complete, since

    @property
    def is_pending(self) -> bool:
        """Whether a call is not complete."""
        return self.called > self.complete


class _Group:
    """A process group of the script."""

    def __init__(self, name: str, ranks: list[int], calls: int, timeout: float) -> None:
        self.name, self.ranks, self.calls, self.timeout = name, ranks, calls, timeout


class _World:
    """The process groups that exist now."""

    def __init__(self) -> None:
        self.groups = list(_read_groups())
        self.by_name = {group.name: group for group in self.groups}
        self.shortest_timeout = min((group.timeout for group in self.groups if group.timeout), default=0.0)


def _read_groups() -> Iterator[_Group]:
    """The groups; raises AttributeError if torch has renamed what holds them."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or getattr(module.__spec__, "_initializing", False):  # while the script imports it
        return
    world: Any = getattr(module, WORLD)
    names: dict[Any, str] = getattr(world, WORLD_FIELDS[0])
    members: dict[Any, dict[int, int]] = getattr(world, WORLD_FIELDS[1])
    for group, name in list(names.items()):
        yield _Group(name, list(members.get(group, ())), *_count_calls(group))


def _count_calls(group: Any) -> tuple[int, float]:
    """How many collectives this process has called in a group, and the timeout."""
    calls, timeout = 0, 0.0
    devices, get_backend = (getattr(group, name) for name in GROUP_METHODS)
    sequence_number, options = BACKEND_METHODS
    try:
        for backend in {id(each): each for each in map(get_backend, devices)}.values():
            calls += getattr(backend, sequence_number)()
            timeout = getattr(backend, options)._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # another thread destroys it, or a backend without these
        return calls, timeout
    return calls, timeout


def _read_status() -> Iterator[tuple[str, str, int, int]]:
    """Backend and id of each group that has called a collective, and its latest called and complete ones."""
    for backend, recorder in _recorders():
        for group, status in recorder.read(False, False).get("pg_status", {}).items():
            yield backend, group, int(status["last_enqueued_collective"]), int(status["last_completed_collective"])


class _Recorder:
    """A flight recorder of torch."""

    def __init__(self, dump: Callable[[bool, bool, bool], bytes]) -> None:
        self._dump = dump

    def read(self, collectives: bool, stacks: bool) -> Answer:
        """What it has recorded. Torch itself makes the pickle from its memory, so it may be loaded."""
        import pickle

        torch: Any = sys.modules["torch"]
        if not stacks or INDUCTOR in vars(torch):
            return pickle.loads(self._dump(collectives, stacks, False))
        stand_in = _NotImported(f"torch.{INDUCTOR}")
        setattr(torch, INDUCTOR, stand_in)
        try:
            return pickle.loads(self._dump(collectives, stacks, False))
        finally:
            if vars(torch).get(INDUCTOR) is stand_in:
                delattr(torch, INDUCTOR)


class _NotImported(ModuleType):
    """Stands for torch._inductor while stacks are read: torch looks there for lines of compiled code.

    Torch imports it for that, which takes seconds, but a script that has not imported it has no compiled code. If
    another thread uses it at this moment, it is imported.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._thread = _thread.get_ident()

    def __getattr__(self, name: str) -> Any:
        if _thread.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(__import__(self.__name__, fromlist=[name]), name)


def _recorders() -> Iterator[tuple[str, _Recorder]]:
    module = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    for backend, name in RECORDERS.items():
        if (dump := getattr(module, name, None)) is not None:
            yield backend, _Recorder(dump)


def _read_collectives(world: _World, with_stacks: bool) -> list[Answer]:
    found: list[Answer] = []
    for backend, recorder in _recorders():
        complete: set[tuple[str, bool]] = set()
        for entry in reversed(recorder.read(True, with_stacks).get("entries", [])):
            each = _read_entry(entry, backend, world)
            kind = each["group"], each["is_p2p"]
            # Parts of a coalesced NCCL call never count as complete, but NCCL completes the calls of a group in order.
            each["is_pending"] &= kind not in complete
            if not each["is_pending"] and backend == "nccl":
                complete.add(kind)
            found.append(each)
    return sorted(found, key=lambda each: each["called"])


def _read_entry(entry: Answer, backend: str, world: _World) -> Answer:
    """A collective in the fields of samestep.hang.evidence.Collective."""
    name, group = entry["process_group"][0], world.by_name.get(entry["process_group"][0])
    is_p2p = bool(entry.get("is_p2p"))
    is_complete = entry.get("retired") or entry.get("state") == "completed" or group is None
    return {
        "group": name,
        "number": entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
        "name": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "shapes": entry.get("input_sizes", []),
        "dtypes": entry.get("input_dtypes", []),
        "called": entry["time_created_ns"] / 1e9,
        "is_pending": not is_complete,
        "timeout": entry.get("timeout_ms", 0) / 1e3,
        "backend": backend,
        "stack": [[each["filename"], each["line"], each["name"]] for each in entry.get("frames", [])[:_FRAMES]],
        "ranks": group.ranks if group is not None else [],
        "is_p2p": is_p2p,
    }


def _unrecorded(call: FrameType, since: float) -> Answer:
    """A call in which the main thread waits and which is not recorded, such as recv over gloo: its timeout is unknown.

    Torch itself raises when it has passed.
    """
    name = call.f_code.co_name
    is_p2p = name in ("send", "recv")
    return {
        "group": "", "number": 0, "name": name, "shapes": [], "dtypes": [], "called": since, "is_pending": True,
        "timeout": 0.0, "backend": "gloo", "stack": _read_frames(call), "ranks": [],
        "is_p2p": is_p2p,
    }  # fmt: skip


def _find_torch_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame in torch.distributed's functions, if the thread is there."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_TORCH_CALLS):
            return frame
        frame = frame.f_back
    return None


def _read_frames(frame: FrameType | None) -> list[list[Any]]:
    """The frames from `frame` outwards: file, line and function."""
    found: list[list[Any]] = []
    while frame is not None and len(found) < _FRAMES:
        found.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return found


def _read_awaited_frames(frame: FrameType) -> list[list[Any]]:
    """If a thread waits in asyncio's event loop: where the coroutine of asyncio.run waits, the innermost frame first.

    Such a coroutine is not on the stack of the thread.
    """
    if not frame.f_code.co_filename.endswith(_SELECTORS):
        return []
    loop: FrameType | None = frame
    while loop is not None and loop.f_code.co_name != "run_until_complete":
        loop = loop.f_back
    task = loop.f_locals.get("future") if loop is not None else None
    found: list[list[Any]] = []
    awaited: Any = getattr(task, "get_coro", lambda: None)()
    while (inside := getattr(awaited, "cr_frame", None)) is not None and len(found) < _FRAMES:
        found.insert(0, _read_frames(inside)[0])
        awaited = awaited.cr_await
    return found


def _serves_multiprocessing() -> bool:
    """Whether this process only starts or cleans up for others: multiprocessing's forkserver and resource tracker."""
    return any(f"multiprocessing.{name}" in " ".join(sys.orig_argv) for name in ("forkserver", "resource_tracker"))


def _open_stack_file(all_threads: bool = True) -> tuple[int, int]:
    """A file in memory that faulthandler writes to at SIGNAL: its descriptor and inode.

    The first line is the main thread. The name ends with the process id, by which the launcher recognizes that the
    descriptor still is this file.
    """
    try:
        file = os.memfd_create(f"{MEMORY_FILE}-{os.getpid()}")
        os.write(file, f"{_thread.get_ident():#x} {os.getcwd()}\n".encode())  # noqa: PTH109
        faulthandler.register(SIGNAL, file=file, all_threads=all_threads, chain=False)
        return file, os.fstat(file).st_ino
    except OSError:  # too many open files, or the current folder was deleted
        return -1, -1


def _close_stack_file(file: int, inode: int) -> None:
    """Close the file that a child has inherited, unless it has closed it and reused its number."""
    try:
        if file >= 0 and os.fstat(file).st_ino == inode:
            os.close(file)
    except OSError:  # closed
        return


def _signal_is_free() -> bool:
    """Whether the script has not installed its own handler for SIGNAL."""
    module: Any = sys.modules["_signal"]  # which Python always loads; signal itself may not be imported yet
    return module.getsignal(SIGNAL) == module.SIG_DFL


def _encode(answer: Answer) -> bytes:
    import json

    return json.dumps(answer).encode()


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:  # it is gone
        return


def _end(seconds: str, code: str) -> None:
    """Flush what the script has printed and call the registered functions, at most for `seconds`, then exit."""
    ended = _thread.allocate_lock()
    ended.acquire()
    _thread.start_new_thread(_run_at_end, (ended,))
    ended.acquire(timeout=float(seconds))
    os._exit(int(code))


def _run_at_end(ended: Any) -> None:
    try:
        for function in (*reversed(_at_end), *(stream.flush for stream in (sys.stdout, sys.stderr) if stream)):
            try:
                function()
            except Exception as error:  # noqa: BLE001 - the others should run as well
                sys.excepthook(type(error), error, error.__traceback__)
    finally:
        ended.release()
