"""A folder that is there as a whole or not at all, however early its maker was stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a folder beside, then rename it: whoever finds `folder` finds all of it."""
    beside = folder.with_name(f".{folder.name}-{uuid4().hex[:12]}")  # of no other process, also on another node
    beside.mkdir(parents=True)
    try:
        make(beside)
        try:
            beside.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been quicker
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
