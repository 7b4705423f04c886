"""The fixture `assert_same_step` in a separate pytest, which finds it by the entry point of pyproject.toml."""

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from samestep.pytest_plugin import AssertSameStep
from samestep.verify import verification
from tests.launch.launched import LAUNCHERS
from tests.verify.test_verify_command import SCRIPT

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = """
import psutil
import pytest


def test_correct(assert_same_step):
    verdict = assert_same_step("train.py", steps=4)
    assert verdict.worlds == {"many": 2, "one": 1}


def test_fault(assert_same_step):
    assert_same_step("train.py", "--mode", "fault")


def test_strict(assert_same_step):
    assert_same_step("train.py", strict=True)


def test_failure(assert_same_step):
    assert_same_step("train.py", "--mode", "fails")


def test_all_tests_share_two_interpreters():
    assert len(psutil.Process().children()) == 2
"""
LOADED = """
import sys


def pytest_sessionfinish():
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("samestep", "torch", "numpy", "rich"))
    print("loaded:", *loaded)
"""


class Ended(NamedTuple):
    code: int
    out: str


@pytest.fixture
def run_pytest(tmp_path):
    """Run pytest on a test file in an empty folder with the script."""
    # The environment of the tests may have an older installation of samestep, without the entry point.
    entries = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = tmp_path / "installed" / "samestep_entry_point-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-entry-point\nVersion: 0\n")
    lines = [f"{name} = {module}" for name, module in entries.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "PYTEST_"))}
    paths = [str(installed.parent), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**clean, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(tests: str, conftest: str = "") -> Ended:
        (folder / "test_training.py").write_text(tests)
        (folder / "conftest.py").write_text(conftest)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        return Ended(ended.returncode, ended.stdout + ended.stderr)

    return run


@pytest.mark.slow
def test_a_test_fails_with_the_findings_as_the_command_prints_them(run_pytest):
    code, out = run_pytest(TESTS)
    assert code == 1
    assert "3 failed, 2 passed" in out
    report = "\n".join(line.removeprefix("E").removeprefix("       ") for line in out.splitlines())
    assert "AssertionError: 1 error found in train.py\n" in report
    assert "\ntrain.py:26: error SS101 duplicated-training-data\n    25 | if mode" in report
    assert "\n  > 26 |     loader = DataLoader(\n" in report
    assert "\n  seen      ranks 0 and 1 trained on the same 32 of 32 samples of epoch 0" in report
    assert "AssertionError: 1 note found in train.py\n" in report
    assert "could not verify train.py: the script fails on one rank as well: FileNotFoundError" in report
    assert "pytest_plugin.py" not in report  # the report ends at the line of the test


def test_a_run_that_does_not_use_the_fixture_imports_nothing(run_pytest):
    code, out = run_pytest("def test_nothing():\n    pass\n", LOADED)
    assert code == 0, out
    assert "loaded: samestep samestep.pytest_plugin\n" in out


def test_the_defaults_are_those_of_the_library():
    ours, library = (inspect.signature(each).parameters for each in (AssertSameStep.__call__, verification.verify))
    for name in ("nproc", "steps", "strict", "timeout", "module"):
        assert ours[name].default == library[name].default
