"""What a test may not leave behind: variables, threads, processes, files in the repository, a process group."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Set by pytest for every test, and by libraries for good when they are first imported.
VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
# Caches are no leftovers, and people write sources and pages while tests run.
FOLDERS = {".git", ".venv", ".ruff_cache", ".hypothesis", ".import_linter_cache", "__pycache__"}
SOURCES = (".py", ".md", ".toml", ".swp", ".tmp")
LINGER_SECONDS = 2.0  # what is about to end may take this long


@dataclass(frozen=True)
class Traces:
    """What can be seen of this process at one moment."""

    variables: dict[str, str]
    threads: frozenset[threading.Thread]
    files: frozenset[str]


def look(repository: Path) -> Traces:
    """See what there is before a test begins."""
    return Traces(dict(os.environ), frozenset(threading.enumerate()), frozenset(files_under(repository)))


def files_under(folder: Path | str) -> Iterator[str]:
    """Find the files that a test could have written and that nobody edits."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in FOLDERS and not entry.name.endswith(".egg-info"):
                yield from files_under(entry.path)
        elif not entry.name.endswith(SOURCES):
            yield entry.path


def leftovers(before: Traces, repository: Path, known_processes: set[int]) -> list[str]:
    """Say what has come since and should have gone; a lingering thread or process gets a moment to end."""
    deadline = time.monotonic() + LINGER_SECONDS
    while (lingering := [*threads(before), *processes(known_processes)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*variables(before), *lingering, *written_files(before, repository), *process_group()]


def variables(before: Traces) -> Iterator[str]:
    """Name variables that were set, changed or deleted."""
    now = dict(os.environ)
    for name in sorted((before.variables.keys() | now.keys()) - VARIABLES):
        then, value = before.variables.get(name), now.get(name)
        if then != value:
            yield f"the variable {name} was {then!r} and is {value!r}: use monkeypatch.setenv or monkeypatch.delenv"


def threads(before: Traces) -> Iterator[str]:
    """Name threads that keep a process from ending."""
    for thread in threading.enumerate():
        if thread not in before.threads and thread.is_alive() and not thread.daemon:
            yield f"the thread {thread.name!r} is still running: join it"


def processes(known: set[int]) -> Iterator[str]:
    """Name children of this process, and theirs, that still run; the helper that multiprocessing starts is not one."""
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            running = child.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if running and child.pid not in known and "multiprocessing.resource_tracker" not in command:
            yield f"the process {child.pid} is still running: {command[:200]}"


def written_files(before: Traces, repository: Path) -> Iterator[str]:
    """Name files that have come into the repository."""
    for path in sorted(set(files_under(repository)) - before.files):
        yield f"the file {os.path.relpath(path, repository)} was left in the repository: write to tmp_path"


def process_group() -> Iterator[str]:
    """Tell of a process group in pytest's own process, without loading torch to ask."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "a process group is still open in this process: close the Run, or use the ranks fixture"


def clean_up(before: Traces) -> None:
    """Undo what can be undone, so that the next test is not blamed for this one."""
    for name in os.environ.keys() - before.variables.keys() - VARIABLES:
        del os.environ[name]
    os.environ.update(before.variables)
    if any(process_group()):
        sys.modules["torch.distributed"].destroy_process_group()
