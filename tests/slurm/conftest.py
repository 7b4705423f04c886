"""The cluster of these tests, what they may leave behind, and a loud word where they cannot run."""

import os
from collections.abc import Iterator

import pytest

from tests import leak_checks
from tests.conftest import REPOSITORY
from tests.slurm.cluster import Cluster, start_cluster, why_not
from tests.warm import Ranks

NEEDED = "SAMESTEP_TESTS_NEED_SLURM"  # set where a skipped test would be a hole that nobody sees


# For a module, not for the session: no later test should find these processes and wonder whose they are.
@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes; skips, or fails in CI, where there can be none."""
    reason = why_not()
    if reason is not None and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, and there is no SLURM: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    with start_cluster() as started:
        yield started


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(ranks: Ranks, cluster: Cluster) -> Iterator[None]:
    """As for all tests; the daemons may stay until the last one, no job may."""
    before = leak_checks.take_snapshot(REPOSITORY)
    yield
    cluster.end_jobs()
    left = leak_checks.leftovers(before, REPOSITORY, ranks.pids | cluster.pids)
    leak_checks.clean_up(before)
    if left:
        pytest.fail("\n".join(["this test leaves something behind:", *left]), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud that SLURM was not tested, and why."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/slurm/" in report.nodeid]
    if skipped:
        terminalreporter.section("SLURM was not tested", yellow=True)
        terminalreporter.line(f"{len(skipped)} test(s) were skipped: {why_not()}")
