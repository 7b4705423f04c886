"""A real disk of a few pages, which a test can fill, empty and make read-only."""

import errno
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A separate tmpfs."""

    path: Path

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            has_space = True
            while has_space:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    has_space = False

    def make_space(self) -> None:
        """Free the space again."""
        (self.path / "filler").unlink()

    def freeze(self, frozen: bool) -> None:
        """Make it read-only, or writable again."""
        _mount("-o", f"remount,{'ro' if frozen else 'rw'}", str(self.path))


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Generator[SmallDisk]:
    """Mount it at `folder` and unmount it at the end; skip the test if mounting is not permitted."""
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={kibibytes}k", "none", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)
