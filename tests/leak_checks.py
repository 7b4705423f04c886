"""What a test must not leave behind: environment variables, threads, processes, files, a process group."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# pytest sets the first for every test; libraries set the others permanently when they are first imported.
IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
# Caches are not leftovers, and people edit sources and pages while tests run.
IGNORED_FOLDERS = {".git", ".venv", ".ruff_cache", ".hypothesis", ".import_linter_cache", "__pycache__"}
IGNORED_SUFFIXES = (".py", ".md", ".toml", ".swp", ".tmp")
MULTIPROCESSING_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
GRACE_SECONDS = 10.0  # for threads and processes that are about to end


@dataclass(frozen=True)
class Snapshot:
    """The state of this process and of the repository at one moment."""

    variables: dict[str, str]
    threads: frozenset[threading.Thread]
    tree: "Tree"


@dataclass(frozen=True)
class Tree:
    """The files under a folder, and when each of its folders last got or lost an entry, in ns."""

    files: frozenset[str]
    changed: dict[Path, int]

    def is_current(self) -> bool:
        """Whether no folder has got or lost an entry since."""
        try:
            return all(folder.stat().st_mtime_ns == moment for folder, moment in self.changed.items())
        except FileNotFoundError:
            return False


_trees: dict[Path, Tree] = {}  # the last one read of each repository
_helpers: set[int] = set()  # processes of multiprocessing that were found before
shared_processes: set[int] = set()  # of fixtures that several tests share; what they start is theirs, too


def take_snapshot(repository: Path) -> Snapshot:
    """Record the state before a test."""
    return Snapshot(dict(os.environ), frozenset(threading.enumerate()), read_tree(repository))


def read_tree(folder: Path) -> Tree:
    """Find files that a test could have written; read the folders again only if one has changed."""
    if folder not in _trees or not _trees[folder].is_current():
        changed = {path: path.stat().st_mtime_ns for path in folders_under(folder)}
        entries = (entry for path in changed for entry in os.scandir(path))
        files = (entry.path for entry in entries if not entry.is_dir(follow_symlinks=False))
        _trees[folder] = Tree(frozenset(path for path in files if not path.endswith(IGNORED_SUFFIXES)), changed)
    return _trees[folder]


def folders_under(folder: Path) -> Iterator[Path]:
    """Find the folders in which a test could write, the given one included."""
    yield folder
    for entry in os.scandir(folder):
        ignored = entry.name in IGNORED_FOLDERS or entry.name.endswith(".egg-info")
        if entry.is_dir(follow_symlinks=False) and not ignored:
            yield from folders_under(Path(entry.path))


def leftovers(before: Snapshot, repository: Path, known_processes: set[int]) -> list[str]:
    """Describe what the test has left behind; threads and processes get a moment to end."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (running := [*threads(before), *processes(known_processes)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*variables(before), *running, *written_files(before, repository), *process_group()]


def variables(before: Snapshot) -> Iterator[str]:
    """Name variables that were set, changed or deleted."""
    now = dict(os.environ)
    for name in sorted((before.variables.keys() | now.keys()) - IGNORED_VARIABLES):
        old, new = before.variables.get(name), now.get(name)
        if old != new:
            yield f"the variable {name} was {old!r} and is {new!r}: use monkeypatch.setenv or monkeypatch.delenv"


def threads(before: Snapshot) -> Iterator[str]:
    """Name threads that keep a process from ending."""
    for thread in threading.enumerate():
        if thread not in before.threads and thread.is_alive() and not thread.daemon:
            yield f"the thread {thread.name!r} is still running: join it"


def processes(known: set[int]) -> Iterator[str]:
    """Name descendants of this process that still run, except the two helper processes of multiprocessing."""
    shared = shared_processes.union(*map(descendants, shared_processes))
    for pid in descendants(os.getpid()) - known - _helpers - shared:
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            running = child.status() != psutil.STATUS_ZOMBIE
            helper = child.ppid() == os.getpid() and any(name in command for name in MULTIPROCESSING_HELPERS)
        except psutil.NoSuchProcess:
            continue
        if helper:
            _helpers.add(pid)
        elif running:
            yield f"the process {child.pid} is still running: {command[:200]}"


def descendants(pid: int) -> set[int]:
    """The processes that `pid` and its children have started; Linux lists them without a look at all processes."""
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found: set[int] = set()
    todo = [pid]
    while todo:
        tasks = Path(f"/proc/{todo.pop()}/task")
        try:
            children = {int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        todo += children - found
        found |= children
    return found


def written_files(before: Snapshot, repository: Path) -> Iterator[str]:
    """Name files that are new in the repository."""
    for path in sorted(read_tree(repository).files - before.tree.files):
        yield f"the file {os.path.relpath(path, repository)} was left in the repository: write to tmp_path"


def process_group() -> Iterator[str]:
    """Report a process group in pytest's own process, without importing torch for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "a process group is still open in this process: close the Run, or use the ranks fixture"


def clean_up(before: Snapshot) -> None:
    """Undo what can be undone, so that the next test does not fail because of this one."""
    for name in os.environ.keys() - before.variables.keys() - IGNORED_VARIABLES:
        del os.environ[name]
    os.environ.update(before.variables)
    if any(process_group()):
        sys.modules["torch.distributed"].destroy_process_group()
