"""Fixtures of the SLURM tests: the cluster, and checks that no job or process is left."""

import os
from collections.abc import Iterator

import pytest

from tests import leak_checks
from tests.conftest import REPOSITORY
from tests.slurm.cluster import Cluster, start_cluster, why_not
from tests.warm import Ranks

NEEDED = "SAMESTEP_TESTS_NEED_SLURM"  # set in CI, where a skipped test must fail instead


# Per module, not per session, since later tests check for leftover processes.
@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes; skips the test, or fails it in CI, if SLURM cannot be started."""
    reason = why_not()
    if reason is not None and NEEDED in os.environ:
        pytest.fail(f"{NEEDED} is set, but SLURM cannot be started: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    with start_cluster() as started:
        yield started


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(ranks: Ranks, cluster: Cluster) -> Iterator[None]:
    """As for all tests, except that the daemons of the cluster may stay."""
    before = leak_checks.take_snapshot(REPOSITORY)
    yield
    cluster.end_jobs()
    left = leak_checks.leftovers(before, REPOSITORY, ranks.pids | cluster.pids)
    leak_checks.clean_up(before)
    if left:
        pytest.fail("\n".join(["this test leaves something behind:", *left]), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report that SLURM was not tested, and why."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/slurm/" in report.nodeid]
    if skipped:
        terminalreporter.section("SLURM was not tested", yellow=True)
        terminalreporter.line(f"{len(skipped)} test(s) were skipped: {why_not()}")
