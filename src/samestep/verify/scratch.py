"""A mirror of the working folder for each world: the script reads the user's files and does not write to them.

Folders above it have links to what is next to it, so that a script finds `../data` and modules of its project.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Final

_MAX_ENTRIES: Final = 20_000
_MAX_FILE_BYTES: Final = 16 * 2**20  # of a file that is copied
_MAX_BYTES: Final = 256 * 2**20  # of all of them
_MAX_BESIDE: Final = 1000  # entries of a folder above the working folder
_MAX_ABOVE: Final = 2  # folders above one that belongs to no project
_PROJECT: Final = {".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg"}
_SKIPPED: Final = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache", "wandb"}


def find_root(folder: Path) -> Path:
    """The folder of the project around a folder, or else one that is a little above it, but not the user's home."""
    shared = (Path.home(), Path(tempfile.gettempdir()), Path(folder.anchor))
    above = list(takewhile(lambda each: each not in shared, folder.parents))
    project = next((each for each in (folder, *above) if {entry.name for entry in _entries(each)} & _PROJECT), None)
    root = folder
    for each in above if project is None else above[: len(folder.relative_to(project).parts)]:
        if len(_entries(each)) > _MAX_BESIDE or (project is None and each not in above[:_MAX_ABOVE]):
            break
        root = each
    return root


def link_beside(root: Path, source: Path, target: Path, left_out: Path) -> Path:
    """Create the folders from `root` to `source` below `target`, with links to what is next to them.

    Returns the one for `source`, which does not exist yet.
    """
    for name in source.relative_to(root).parts:
        target.mkdir()
        for entry in _entries(root):
            if entry.name != name and not left_out.is_relative_to(entry.path):
                (target / entry.name).symlink_to(entry.path)
        root, target = root / name, target / name
    return target


def make_mirror(source: Path, target: Path, left_out: Path) -> None:
    """Create folders like those of `source`, without `left_out`, with copies of small files and links to large ones.

    Native code that writes to a path cannot be observed, so that a link would lead it to the user's file. A link to a
    folder becomes a folder as well. Folders beyond a limit are links themselves, so that a dataset with millions of
    files takes no time.
    """
    target.mkdir(parents=True, exist_ok=True)
    left, copied = _MAX_ENTRIES, 0
    folders = [(source, target)]
    while folders:
        folder, copy = folders.pop(0)
        entries = _entries(folder)
        left -= len(entries)
        for entry in entries:
            destination = copy / entry.name
            if Path(entry.path) == left_out:
                continue
            if entry.is_dir() and entry.name not in _SKIPPED and left > 0 and not _is_cycle(entry, source):
                destination.mkdir(exist_ok=True)
                folders.append((Path(entry.path), destination))
            elif _is_small(entry) and copied < _MAX_BYTES:
                shutil.copy2(entry.path, destination)
                copied += entry.stat().st_size
            else:
                destination.symlink_to(entry.path)


def _is_cycle(entry: os.DirEntry[str], source: Path) -> bool:
    """Whether a link leads to a folder around it, or into what is mirrored anyway."""
    if not entry.is_symlink():
        return False
    target, source = Path(entry.path).resolve(), source.resolve()
    return target.is_relative_to(source) or source.is_relative_to(target)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # it cannot be read, by the script neither
        return []


def _is_small(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file() and entry.stat().st_size <= _MAX_FILE_BYTES and os.access(entry.path, os.R_OK)
    except OSError:  # a link to nothing
        return False


def linked_files(mirror: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The user's files that a mirror links to, with their sizes and times of change."""
    for path in mirror.rglob("*"):
        if path.is_symlink() and path.is_file():
            status = path.stat()
            yield path.resolve(), (status.st_size, status.st_mtime_ns)
