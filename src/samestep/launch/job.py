"""One node's part of a job: what to start, how many ranks, in which folder and with which environment variables."""

import re
import stat
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from typing import Literal

from samestep.environment.hardware import Bf16Support
from samestep.environment.world import MAX_LOCAL_RANKS, export, read_environ
from samestep.errors import LaunchError
from samestep.launch.rendezvous import Rendezvous
from samestep.messages import read_integer, shorten

ShowRanks = Literal["first", "all"]
OnHang = Literal["default", "report", "stop", "restart"]

_NATIVE_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NCCL_DUMP_TIME, _NCCL_DUMP_MILLISECONDS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 3000
# SLURM's formats, in the order of its manual; a number alone is minutes. The last one is samestep's.
_TIME_FORMATS = (
    r"(?P<m>\d+)",
    r"(?P<m>\d+):(?P<s>[0-5]?\d)",
    r"(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?:in)?)?(?:(?P<s>\d+)s)?",
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_LIMIT = 100 * 365 * 86400  # seconds; a limit of more than a hundred years is a mistake


@dataclass(frozen=True)
class Job:
    """One node's part of a job."""

    target: str  # path of a script, or name of a module
    module: bool  # whether `target` is a module, as in `python -m`
    arguments: tuple[str, ...]
    processes: int  # ranks on this node
    rendezvous: Rendezvous
    max_restarts: int  # of all ranks, after a failure
    folder: Path  # absolute path; contains the logs
    folder_is_explicit: bool = True  # if not, run.checkpoint may choose another folder for the run's files
    show: ShowRanks = "first"  # whose output the console shows: local rank 0, or all ranks
    verbose: bool = False  # whether the log of torch's agent goes to the console
    time_limit: str = ""  # as the user gave it; empty if there is none
    on_hang: OnHang = "default"  # by default, report it, and end the ranks at the timeout
    shows_failure: bool = True  # whether the console shows the report of a failure; if not, the parent process does

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of the Python interpreter; unbuffered, so that the last output of a killed rank is kept."""
        return ("-u", *(("-m",) if self.module else ()), self.target, *self.arguments)


def choose_variables(
    job: Job, environ: Mapping[str, str], cores: int, gpus: int, bf16: Bf16Support
) -> tuple[dict[str, str], str]:
    """Variables to set for the ranks, without those that the user has set, and a line that explains them."""
    shared = f"{_count(cores, 'core')} for {_count(job.processes, 'rank')}, {_count(gpus, 'GPU')}"
    wanted = {"OMP_NUM_THREADS": (str(max(1, cores // job.processes)), shared)}
    if job.max_restarts > 0 or job.rendezvous.max_nodes > 1:  # after a failure, or because nodes join or leave
        reason = "the store that torch shares with its agent keeps outdated addresses after a restart"
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = ("1", reason)
    if gpus:
        reason = "NCCL ends a rank 12 s after a timeout, not 60 s"  # it sleeps four times as long
        wanted[_NCCL_DUMP_TIME] = (str(_NCCL_DUMP_MILLISECONDS), reason)
    wanted |= {name: (value, bf16.detail) for name, value in bf16.workaround.items()}
    values = {name: value for name, (value, _) in wanted.items() if name not in environ}
    explained = [
        f"{name}={value} ({reason})" if name in values else f"{name}={environ[name]} (set by you)"
        for name, (value, reason) in wanted.items()
    ]
    values |= {"SAMESTEP_FOLDER": str(job.folder), "SAMESTEP_FOLDER_IS_EXPLICIT": str(int(job.folder_is_explicit))}
    return values, "; ".join(explained)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' if number > 1 else ''}"


def count_processes(option: str, gpus: int, cores: int) -> int:
    """Number of ranks on this node for `auto`, `gpu`, `cpu` or a number.

    `auto` is one rank per GPU, or without GPUs one rank per two cores, since each rank also loads data.

    >>> count_processes("auto", gpus=4, cores=64), count_processes("auto", gpus=0, cores=6)
    (4, 3)
    """
    if option == "gpu" and gpus == 0:
        raise LaunchError("--nproc-per-node gpu needs a GPU, but torch finds none: use cpu, or a number")
    named = {"auto": gpus or max(1, cores // 2), "gpu": gpus, "cpu": cores}
    if option in named:
        return named[option]
    if not option.isdecimal() or read_integer(option) == 0:
        raise LaunchError(f"--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got {option}")
    number = read_integer(option)
    if number is None or number > MAX_LOCAL_RANKS:
        raise LaunchError(
            f"--nproc-per-node {shorten(option)} is more than {MAX_LOCAL_RANKS}, and every rank is a process that "
            "imports torch: use one rank per GPU or per few cores"
        )
    return number


def count_gpus(quiet: bool) -> int:
    """Number of GPUs that torch finds; imports torch but does not initialize a GPU.

    With `quiet`, torch's native code logs fatal errors only, so that its stack traces do not hide the launcher's
    messages. torch reads the level once, at import, and the ranks get the level that they would have had.
    """
    level = read_environ().get(_NATIVE_LOG_LEVEL)
    if quiet and level is None:
        export({_NATIVE_LOG_LEVEL: "FATAL"})
    import torch

    export({_NATIVE_LOG_LEVEL: level or "WARNING"})
    return torch.cuda.device_count()


def read_time_limit(option: str, text: str) -> int:
    """Seconds of a limit such as 4:00:00, 1-12:00 or 3h55m; an error names the `option`.

    >>> read_time_limit("--time", "90"), read_time_limit("--time", "3h55m"), read_time_limit("--time", "1-12")
    (5400, 14100, 129600)
    """
    for time_format in _TIME_FORMATS:
        match = re.fullmatch(time_format, text.strip().lower(), re.ASCII)
        parts = {unit: read_integer(number or "0") for unit, number in match.groupdict().items()} if match else {}
        seconds = sum(_SECONDS[unit] * (_LONGEST_LIMIT if part is None else part) for unit, part in parts.items())
        if seconds >= _LONGEST_LIMIT:
            raise LaunchError(f"{option} {shorten(text)} is longer than 100 years: leave it out to have no time limit")
        if seconds:
            return seconds
    raise LaunchError(
        f"{option} {text} is not a time limit: pass hours, minutes and seconds as in 4:00:00 or 3h55m, with days as in "
        "1-12:00:00 or 1d12h, or a number of minutes"
    )


def folder_name(target: str, now: datetime) -> str:
    """The default name of a run's folder: the script and the time.

    >>> folder_name("lab/train.py", datetime(2026, 1, 31, 9, 30, 5))
    'train-20260131-093005'
    """
    return f"{Path(target).stem if target.endswith('.py') else Path(target).name}-{now:%Y%m%d-%H%M%S}"


def make_folder(explicit: Path | None, name: str) -> Path:
    """Create the run's folder: the explicit one, or a new one in `runs`."""
    number = 1
    folder = explicit or Path("runs") / name
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=explicit is not None)
        except FileExistsError as error:
            if explicit is not None:
                raise LaunchError(f"--folder {explicit} is a file: choose a folder or a new name") from error
            number += 1  # two runs of one script started within a second
            folder = Path("runs") / f"{name}-{number}"
        except OSError as error:
            raise LaunchError(
                f"cannot create the run's folder {folder} ({error.strerror}): choose another --folder"
            ) from error
        else:
            return folder


def check_target(target: str, module: bool) -> None:
    """Raise if `python TARGET`, or `python -m TARGET` for a module, could not start; imports nothing."""
    here = Path.cwd()
    if module:
        _check_module(target, here)
        return
    script = Path(target)
    try:
        mode = script.stat().st_mode
        if stat.S_ISDIR(mode):
            raise LaunchError(
                f"{shorten(target)} is a folder, not a script: pass a file, or `samestep run -m PACKAGE` for a package"
            )
        if not stat.S_ISREG(mode):
            raise LaunchError(f"{target} is not a regular file, and every rank reads the script: pass a file")
        source = script.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        nearby = sorted(entry.name for entry in here.glob("*.py"))[:5]
        hint = f"scripts there: {', '.join(nearby)}" if nearby else "no scripts found there"
        raise LaunchError(f"script {shorten(target)} not found in {here}; {hint}") from error
    except OSError as error:
        raise LaunchError(
            f"script {shorten(target)} cannot be read ({error.strerror}): check its permissions and those of its folder"
        ) from error
    except ValueError as error:  # a path with a null byte
        raise LaunchError(f"script {shorten(target)} not found in {here}; the path is not valid") from error
    _check_source(target, source)


def _check_source(target: str, source: bytes) -> None:
    """Raise if Python cannot compile a script, which every rank would report."""
    if source.startswith(b"PK") or target.endswith(".pyc"):  # Python also runs zip files and compiled modules
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # Python shows them in the ranks
            compile(source, target, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise LaunchError(
            f"{target} is not a Python script{where} ({getattr(error, 'msg', error)}): correct it, or pass another file"
        ) from error
    except (RecursionError, MemoryError):  # Python may be able to compile it in the rank, which has a smaller stack
        return


def _check_module(name: str, here: Path) -> None:
    path = [str(here), *sys.path]
    for part in accumulate(name.split("."), "{}.{}".format):
        spec = _find_spec(part, path)
        if spec is None:
            raise LaunchError(
                f"module {name} not found: {part} is neither in {here} nor installed; pass the dotted name as in "
                "`samestep run -m package.module`, from the folder that contains the package"
            )
        path = list(spec.submodule_search_locations or [])
    if path and _find_spec(f"{name}.__main__", path) is None:
        raise LaunchError(f"{name} is a package without __main__.py: pass a module in it, as in {name}.train")


def _find_spec(name: str, path: list[str]) -> ModuleSpec | None:
    specs = (
        finder.find_spec(name, path) for finder in sys.meta_path if path
    )  # a module that is not a package has none
    return next(filter(None, specs), None)
