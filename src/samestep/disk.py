"""Small files that are there as a whole or not at all, and on the disk when we say so."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
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
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder last through a power failure: a rename is a change of the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
