"""Small files that are there as a whole or not at all, and on the disk when we say so; why a disk takes nothing."""

import errno
import os
from pathlib import Path
from typing import Final

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_CAUSES: Final = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the quota is used up: make room",
    errno.EACCES: "there is no permission: choose a folder that you may write, or change its permissions",
    errno.EPERM: "it is not permitted: choose a folder that you may write, or change its permissions",
    errno.EROFS: "the disk is read-only: choose another folder",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another folder",
    errno.EISDIR: "a folder stands where a file is needed: choose another folder",
    errno.EFBIG: "the file may not become so large: raise the limit (ulimit -f)",
}


def describe_os_error(error: OSError) -> str:
    """Why the operating system refused, and what to do.

    >>> in_words(OSError(errno.ENOSPC, "No space left on device"))
    'the disk is full: make room'
    """
    return _CAUSES.get(error.errno or 0, error.strerror or str(error))


def is_disk_error(error: OSError) -> bool:
    """Whether it is the disk that refused, rather than what is done with it."""
    return error.errno in (*_CAUSES, errno.EIO, errno.ESTALE)


def write_atomically(path: Path, text: str) -> None:
    """Put a small file in place of another in one act: a reader finds the old or the new one, also after a crash."""
    # In the same folder, since only there a rename is one act; the process id, since others may write at the same time.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power failure: a rename is a change of the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
