"""Fixtures of the tests of verify: processes that have imported torch, shared by the tests of a module."""

import os
from collections.abc import Iterator

import pytest

from samestep.verify import Interpreters
from tests import leak_checks


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    before = leak_checks.descendants(os.getpid())
    with Interpreters() as shared:
        started = leak_checks.descendants(os.getpid()) - before
        leak_checks.shared_processes.update(started)
        shared.wait_until_ready()
        yield shared
    leak_checks.shared_processes.difference_update(started)
