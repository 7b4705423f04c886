"""What the tests of elasticity compare with, two nodes to break, and a loud word where there can be none."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.killing import EPOCHS, TRAINING
from tests.elastic.nodes import Nodes, make_nodes, why_not

NEEDED = "SAMESTEP_TESTS_NEED_NODES"  # set where a skipped test would be a hole that nobody sees


@pytest.fixture(autouse=True)
def answers_are_kept_for_all_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """The trial of bfloat16 costs seconds: once for all tests, and not in the home of whoever runs them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training on one rank, which nobody killed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    command = [sys.executable, str(TRAINING), str(out), str(EPOCHS)]
    subprocess.run(command, check=True, timeout=100, capture_output=True, cwd=out.parent)
    return out


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes with a cable between them; skips, or fails in CI, where there can be none."""
    reason = why_not()
    if reason is not None and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, and there are no nodes: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    with make_nodes() as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud that several nodes were not tested, and why."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/elastic/" in report.nodeid]
    if skipped:
        terminalreporter.section("several nodes were not tested", yellow=True)
        terminalreporter.line(f"{len(skipped)} test(s) were skipped: {why_not()}")
