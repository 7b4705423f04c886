"""`samestep.launch`: start ranks from a notebook or a script, and return what the function returns on rank 0.

The launcher is the one of `samestep run`, in a separate process: it handles signals, adopts orphaned processes and
ends every process below it, which a notebook's kernel must not do. The function travels through a temporary folder,
pickled by value if it is defined in a notebook or a script, so that the ranks need not import `__main__`. Its result,
and the exceptions of the ranks, come back through the same folder.
"""

import codecs
import json
import linecache
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TextIO, TypeVar

from samestep.environment.hardware import read_hardware
from samestep.environment.processes import OPEN_RUN, own_variable
from samestep.environment.world import read_environ, read_world
from samestep.errors import LaunchError, RankFailed
from samestep.launch.job import OnHang, ShowRanks, count_processes, folder_name, make_folder, read_time_limit

T = TypeVar("T")

_SENT, _VALUE = "function.pkl", "value.pkl"
_CHUNK = 1 << 16
_POLL_SECONDS = 0.5
_END_SECONDS = 30.0  # that the launcher gets to end its ranks after an error in this process
_USAGE_ERROR = 2  # exit code of `samestep run` for a mistake that one line explains


def launch(
    function: Callable[..., T],
    /,
    *arguments: object,
    nproc: int | Literal["auto", "gpu", "cpu"] = "auto",
    folder: str | Path | None = None,
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    max_restarts: int = 0,
    time_limit: str | None = None,
    on_hang: OnHang | None = None,
    show_ranks: ShowRanks = "first",
) -> T:
    """Call `function(*arguments)` on every rank of this machine; return the value of rank 0.

    The ranks are new processes, also for functions of a notebook or of `__main__`; what the function uses is pickled.
    Output of rank 0 appears while it runs, that of the other ranks is in the logs. If a rank fails, its exception is
    raised here, with the launcher's report as a note. Ctrl-C, or the interruption of the kernel, ends all ranks.

    Args:
        function: The function; pass `functools.partial(function, lr=0.1)` for keyword arguments.
        arguments: Its arguments.
        nproc: Number of ranks; "auto" is one per GPU, or one per two cores without GPUs.
        folder: Folder of the run's files. Default: a new one in `runs/`.
        precision: Replaces the precision of the `Run`.
        max_restarts: How often to restart all ranks after a failure; each time they call the function again.
        time_limit: Save and end before this time is over, as in "3h55m".
        on_hang: "report", "stop" or "restart", as `samestep run --on-hang`.
        show_ranks: Whose output to show: "first" for rank 0, or "all".

    """
    name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "function")
    _refuse_in_rank(name)
    _check_options(nproc, max_restarts, time_limit)
    data = _pickle_call(name, function, arguments)
    default = folder_name(re.sub(r"\W", "", name), datetime.now().astimezone())  # without the <> of a lambda
    run_folder = make_folder(None if folder is None else Path(folder), default)
    options = {
        "--nproc-per-node": str(nproc),
        "--folder": str(run_folder.absolute()),
        "--max-restarts": str(max_restarts),
        "--show-ranks": show_ranks,
        "--precision": precision,
        "--time-limit": time_limit,
        "--on-hang": on_hang,
        "--parent": str(os.getpid()),
    }
    words = [word for option, value in options.items() if value is not None for word in (option, value)]
    with tempfile.TemporaryDirectory(prefix="samestep-launch-") as exchange:
        Path(exchange, _SENT).write_bytes(data)
        events = _EventFile(run_folder)
        target = ["-m", __spec__.name, exchange]
        code, last_words = _run_launcher([*words, *(["--folder-is-default"] if folder is None else []), *target])
        if code != 0:
            _raise_failure(name, code, last_words, events, Path(exchange))
        return _read_value(name, Path(exchange))


def _refuse_in_rank(name: str) -> None:
    environ = read_environ()
    if environ.get(OPEN_RUN, "").startswith(f"{own_variable()} "):
        raise LaunchError(
            f"samestep.launch({name}) was called while a Run is open in this process: call it before `with Run`, or "
            "after the run has ended"
        )
    world = read_world(environ)
    if world.launcher == "torchrun" or world.size > 1:
        raise LaunchError(
            f"samestep.launch({name}) was called on rank {world.rank} of {world.size}, which a launcher has started "
            f"already: call {name}() itself there, or start the script with plain `python`"
        )


def _check_options(nproc: object, max_restarts: object, time_limit: str | None) -> None:
    names = ("auto", "gpu", "cpu")
    if nproc not in names and (not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1):
        raise LaunchError(f'nproc must be a number of at least 1, "auto", "gpu" or "cpu", got {nproc!r}')
    count_processes(str(nproc), gpus=1, cores=read_hardware().cores.usable)  # too many
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise LaunchError(f"max_restarts must be a number of at least 0, got {max_restarts!r}")
    if time_limit is not None:
        read_time_limit("time_limit", time_limit)


def _pickle_call(name: str, function: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    """What the ranks need in order to call the function, as `run_rank` reads it."""
    if not callable(function):
        raise LaunchError(
            f"samestep.launch needs a function, got {function!r}: pass the function itself, not its value"
        )
    cloudpickle = _import_cloudpickle()
    try:
        call = cloudpickle.dumps((function, arguments))
    except Exception as error:  # whatever the object's own pickling raises
        raise LaunchError(
            f"samestep.launch cannot send {name} and its arguments to the ranks ({type(error).__name__}: {error}): "
            f"create locks, open files, processes and runs inside of {name}, and not as globals that it uses"
        ) from error
    is_script = hasattr(sys.modules["__main__"], "__file__")
    sent = {
        "call": call,
        "path": sys.path,
        "argv": sys.argv if is_script else [name],
        "sources": _interactive_sources(),
    }
    return pickle.dumps(sent)


def _import_cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise LaunchError(
            f"samestep.launch needs cloudpickle and cannot import it ({error}): run `pip install cloudpickle`, or "
            "start a script with `samestep run`"
        ) from error
    return cloudpickle


def _interactive_sources() -> dict[str, list[str]]:
    """Source lines of notebook cells by their file name, which only this process knows; for tracebacks of ranks."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}  # others are not read yet
    return {name: entry[2] for name, entry in entries.items() if not os.path.exists(name)}  # noqa: PTH110  # any string


class _EventFile:
    """The events that the launcher records from now on; a folder may have those of earlier launches."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "logs" / f"launcher-{socket.gethostname()}.jsonl"
        self._start = self._path.stat().st_size if self._path.exists() else 0

    def last(self, *kinds: str) -> Mapping[str, Any]:
        """The last event of these kinds; empty if there is none, as after a disk was full."""
        found: dict[str, Any] = {}
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._start)
            for line in file:
                with suppress(ValueError):  # a line that was cut
                    event = json.loads(line)
                    found = event if event["event"] in kinds else found
        return found


def _run_launcher(words: list[str]) -> tuple[int, str]:
    """Run `samestep run` to its end and show its output; returns its exit code and the last line of its messages.

    It has a separate session, so that Ctrl-C in a terminal reaches it once, from here: a second signal would kill
    the ranks, which get time to end. It ends the ranks if this process is killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "run", *words],
        stdin=subprocess.DEVNULL,
        stdout=_pipe_unless_console(sys.stdout, sys.__stdout__),
        stderr=_pipe_unless_console(sys.stderr, sys.__stderr__),
        env=_launcher_environ(),
        start_new_session=True,
    )
    copier = _OutputCopier(process)
    interrupt: KeyboardInterrupt | None = None
    try:
        while process.returncode is None:
            try:
                copier.copy()
            except KeyboardInterrupt as error:
                interrupt = error
                process.send_signal(signal.SIGINT)  # a second one kills the ranks
    finally:
        _end(process)
        copier.close()
    if interrupt is not None:
        raise interrupt
    assert process.returncode is not None
    return process.returncode, copier.last_line


def _pipe_unless_console(stream: object, original: object) -> int | None:
    """None to inherit the stream, which can be a terminal; a pipe if a notebook or a test has replaced it."""
    return None if stream is original and stream is not None else subprocess.PIPE


def _launcher_environ() -> dict[str, str]:
    """The variables of this process; the launcher finds samestep where this process has found it."""
    environ, root = read_environ(), Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return environ
    known = environ.get("PYTHONPATH", "")
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), known)))}


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:  # after an error in this process, such as a closed output
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


class _OutputCopier:
    """Copies what the launcher prints to the streams of this process, which a notebook shows in the cell."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._selector = selectors.DefaultSelector()
        self.last_line = ""
        decoder = codecs.getincrementaldecoder("utf-8")
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, (name, decoder("replace")))

    def copy(self) -> None:
        """Copy until the process has ended and everything is copied."""
        while self._selector.get_map():
            ready = self._selector.select(_POLL_SECONDS)
            for key, _ in ready:
                self._copy_chunk(key)
            if not ready and self._process.poll() is not None:  # another process keeps a pipe open
                break
        self._process.wait()

    def _copy_chunk(self, key: selectors.SelectorKey) -> None:
        name, decoder = key.data
        data = os.read(key.fd, _CHUNK)
        text = decoder.decode(data, final=not data)
        if not data:
            self._selector.unregister(key.fileobj)
        if text:
            stream: TextIO | None = getattr(sys, name)
            if stream is not None:
                stream.write(text)
                stream.flush()
            if name == "stderr" and text.strip():
                self.last_line = text.strip().splitlines()[-1]

    def close(self) -> None:
        """Close the pipes."""
        pipes: list[IO[bytes] | None] = [self._process.stdout, self._process.stderr]
        for pipe in filter(None, pipes):
            pipe.close()
        self._selector.close()


def _raise_failure(name: str, code: int, last_words: str, events: _EventFile, exchange: Path) -> NoReturn:
    """Raise the exception of the rank that has failed first; RankFailed if it has left none."""
    event = events.last("failure", "stopped")
    report = event.get("report") or event.get("text")
    if report is None:
        if code == _USAGE_ERROR:
            message = last_words.removeprefix("samestep: ") or "the launcher has printed why"
            raise LaunchError(f"samestep.launch({name}) cannot start: {message}")
        raise RankFailed(
            f"samestep.launch({name}): the launcher ended with exit code {code}; it has printed why, or was killed"
        )
    error = _read_error(exchange / _error_file(event["rank"])) if "rank" in event else None
    if error is None:
        raise RankFailed(f"samestep.launch({name}) got no value from rank 0\n{report}")
    error.add_note(f"raised on rank {event['rank']} in samestep.launch({name})\n{report}")
    raise error


def _read_error(path: Path) -> Exception | None:
    """The exception of a rank; None if it left none, as one that cannot be pickled."""
    data = path.read_bytes() if path.exists() else b""
    try:
        return pickle.loads(data) if data else None
    except Exception as error:  # noqa: BLE001  # for example of a module that only the ranks can import
        return RankFailed(f"its exception cannot be read in this process ({type(error).__name__}: {error})")


def _read_value(name: str, exchange: Path) -> Any:
    path = exchange / _VALUE
    if not path.exists():
        raise RankFailed(
            f"samestep.launch({name}) got no value: rank 0 ended with exit code 0 before {name} returned; remove "
            "sys.exit() or os._exit() from it"
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:
        raise RankFailed(
            f"samestep.launch({name}) cannot read the value of rank 0 in this process ({type(error).__name__}: "
            f"{error}): return numbers, strings, or tensors on the CPU"
        ) from error


def _error_file(rank: int) -> str:
    return f"error-{rank}.pkl"


def run_rank(exchange: Path) -> None:
    """Call the function on this rank, and leave its value or its exception in the folder."""
    rank = read_world().rank
    path = exchange / _error_file(rank)
    path.unlink(missing_ok=True)  # of an attempt before a restart
    sent = pickle.loads((exchange / _SENT).read_bytes())
    sys.path[:], sys.argv[:] = sent["path"], sent["argv"]
    for name, lines in sent["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # None: there is no file to compare it with
    try:
        function, arguments = pickle.loads(sent["call"])
        value = function(*arguments)
        if rank == 0:
            _write(exchange / _VALUE, _pickle_value(value))
    except Exception as error:  # noqa: BLE001  # the launcher's process raises it again
        with suppress(OSError):  # a full disk: the log has the traceback
            _write(path, _pickle_error(error))
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace.tb_next if trace is not None else None))
        sys.exit(1)


def _pickle_value(value: object) -> bytes:
    try:
        return _import_cloudpickle().dumps(value)
    except Exception as error:
        raise LaunchError(
            f"the value that rank 0 returns cannot be sent back ({type(error).__name__}: {error}): return numbers, "
            "strings or tensors, for example model.state_dict() and not the run"
        ) from error


def _pickle_error(error: Exception) -> bytes:
    """The pickled exception; empty if it would not become the same exception again."""
    try:
        data = _import_cloudpickle().dumps(error)
        return data if type(pickle.loads(data)) is type(error) else b""
    except Exception:  # noqa: BLE001  # its own constructor, an open file inside: the report has its traceback
        return b""


def _write(path: Path, data: bytes) -> None:
    """Write a file that is never seen in part: the launcher may kill this rank."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
