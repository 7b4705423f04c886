"""Processes with the probe, for the tests of what the launcher knows about them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hang.probed import ProbedProcesses, probed


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ProbedProcesses]:
    """Starts processes with the probe, and ends them after the test."""
    with probed(tmp_path) as started:
        yield started
