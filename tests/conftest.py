"""Fixtures for all tests: warm ranks, and checks for what a test leaves behind."""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import leak_checks, warm

REPOSITORY = Path(__file__).resolve().parent.parent

# No deadline: the time of one example depends on the load of the machine. CI draws the same examples every time.
hypothesis.settings.register_profile(
    "samestep", deadline=None, database=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("samestep"), max_examples=25)

warm.replace_environment(warm.without_launcher_variables(os.environ))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background: children would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Without slow tests, draw a quarter of hypothesis' examples."""
    hypothesis.settings.load_profile("fast" if config.option.markexpr == "not slow" else "samestep")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, do not import what has no others: Lightning alone takes seconds, in every worker."""
    if config.option.markexpr != "not slow":
        return None
    if collection_path.is_dir():
        modules = list(collection_path.glob("test_*.py"))
        return (bool(modules) and all(map(has_slow_tests_only, modules))) or None
    return has_slow_tests_only(collection_path) or None


def pytest_collection_finish() -> None:
    """Keep torch's objects out of later garbage collections, and its operations from competing for the cores."""
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def has_slow_tests_only(path: Path) -> bool:
    """Whether the tests of a module are slow by `pytestmark`."""
    return path.name.startswith("test_") and bool(
        re.search(r"^pytestmark = \[?pytest\.mark\.slow", path.read_text(), re.M)
    )


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm.Ranks]:
    """Warm processes: `ranks(2, function, *arguments)` runs a module-level function on two ranks."""
    pool = warm.Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, as XDG_CACHE_HOME, in which the workers of this session unpack models once for all tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "model-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(ranks: warm.Ranks) -> Iterator[None]:
    """Fail a test that leaves a variable, a thread, a process, a file or a process group."""
    before = leak_checks.take_snapshot(REPOSITORY)
    yield
    left = leak_checks.leftovers(before, REPOSITORY, ranks.pids)
    leak_checks.clean_up(before)
    if left:
        pytest.fail("\n".join(["this test leaves something behind:", *left]), pytrace=False)
