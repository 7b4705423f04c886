"""Fixtures of the tests of verify: processes that have imported torch, shared by all its modules in a worker."""

import os
from pathlib import Path

import pytest

from samestep.verify import Interpreters
from tests import leak_checks

HERE = Path(__file__).resolve().parent


class Shared:
    """The processes, from the first test that needs them to the last test of verify."""

    interpreters: Interpreters | None = None
    processes = frozenset[int]()

    @classmethod
    def start(cls) -> Interpreters:
        if cls.interpreters is None:
            before = leak_checks.descendants(os.getpid())
            cls.interpreters = Interpreters()
            cls.processes = frozenset(leak_checks.descendants(os.getpid()) - before)
            leak_checks.shared_processes.update(cls.processes)
            cls.interpreters.wait_until_ready()
        return cls.interpreters

    @classmethod
    def stop(cls) -> None:
        if cls.interpreters is not None:
            cls.interpreters.close()
            cls.interpreters = None
            leak_checks.shared_processes.difference_update(cls.processes)


@pytest.fixture
def interpreters() -> Interpreters:
    return Shared.start()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes if the next test of this worker is not one of verify."""
    if nextitem is None or HERE not in nextitem.path.parents:
        Shared.stop()
