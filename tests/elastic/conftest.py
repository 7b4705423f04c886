"""Fixtures of the elastic tests: an undisturbed training to compare with, and two nodes in network namespaces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.kills import EPOCHS, TRAINING
from tests.elastic.nodes import Nodes, make_nodes, why_not

NEEDED = "SAMESTEP_TESTS_NEED_NODES"  # set in CI, where a skipped test must fail instead


@pytest.fixture(autouse=True)
def share_the_bf16_probe(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """The bfloat16 probe takes seconds: cache its result for all tests, outside of the home directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training on one rank without kills."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    command = [sys.executable, str(TRAINING), str(out), str(EPOCHS)]
    subprocess.run(command, check=True, timeout=240, capture_output=True, cwd=out.parent)
    return out


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two connected nodes; skips the test, or fails it in CI, if they cannot be created."""
    reason = why_not()
    if reason is not None and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, but nodes cannot be created: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    with make_nodes() as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report that several nodes were not tested, and why."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/elastic/" in report.nodeid]
    if skipped:
        terminalreporter.section("several nodes were not tested", yellow=True)
        terminalreporter.line(f"{len(skipped)} test(s) were skipped: {why_not()}")
