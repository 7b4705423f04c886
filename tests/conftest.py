"""Fixtures of all tests: warm ranks, and a watch over what a test leaves behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import police, warm

REPOSITORY = Path(__file__).resolve().parent.parent

# Two busy cores make any time limit for one example a matter of luck; CI draws the same examples every time.
hypothesis.settings.register_profile(
    "samestep", deadline=None, database=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("samestep")

warm.replace_environment(warm.forget_launchers(os.environ))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm.Ranks]:
    """Warm processes: `ranks(2, function, *arguments)` runs a module-level function on two ranks."""
    pool = warm.Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session keeps models that were unpacked, as XDG_CACHE_HOME: once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(ranks: warm.Ranks) -> Iterator[None]:
    """Fail a test that leaves a variable, a thread, a process, a file or a process group."""
    before = police.look(REPOSITORY)
    yield
    left = police.leftovers(before, REPOSITORY, ranks.pids)
    police.clean_up(before)
    if left:
        pytest.fail("\n".join(["this test leaves something behind:", *left]), pytrace=False)
