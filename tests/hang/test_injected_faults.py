"""Faults injected for real: the launcher names the rank, its line and the reason, in four kinds of scripts.

What is not in the table: a busy rank (`loop`, `gil`) costs a core until the timeout and does not depend on the kind of
script, so that one kind is enough. Lightning takes seconds to import, so that it has the cases in which it may differ:
its own frames are between the line of the user and the collective. Lightning and Accelerate have no samestep call.

The suite runs all kinds of faults for plain DDP and for samestep, and some for Lightning and Accelerate, because each
rank takes about 2 s of CPU time to import torch, and 7 s for Lightning. SAMESTEP_TESTS_ALL_HANGS=1 runs all of the
table.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.hang.injected_faults import (
    IF_ALL,
    ON_CPU,
    Case,
    CoreLoad,
    Launch,
    check,
    check_launches,
    run_cases,
    stop_rank_1,
)

MODULE = sys.modules[__name__]

REFUSED = r"(?s)Received data size doesn't match expected size.*rank 0 +pid \d+ +victim: killed by SIGABRT: gloo got"
ENDED_3 = r"rank 1 +pid \d+ +exit code 3  <- first failure"
ENDED_0 = r"rank 1 .*ended with exit code 0"
# Rank 0 may have waited for long before rank 1 has ended. Torch finds out by SIGCHLD, while it receives a batch, or
# when it looks whether its workers run.
KILLED = (
    r"(?s)rank 1 +pid \d+ +exit code 1  <- (first failure|the cause).*"
    r"(is killed by signal: Killed|ConnectionResetError|DataLoader worker \(pid\(s\) \d+\) exited unexpectedly)"
)


def both(kind: str, **options) -> dict:
    """Neither of two ranks that wait for each other is the culprit alone."""
    return {"kind": kind, "culprits": (0, 1), **options}


DIFFERENT = both("different_collectives", waits="others: different")
RANK_0 = {"kind": "rank_0_only", "culprits": (0,), "waits": "waits: rank_0"}
STOPPED = {"kind": "stopped", "at": "", "during": stop_rank_1}
EXIT_CODE = {"says": ENDED_3, "code": 3}
REFUSES = {"kind": None, "says": REFUSED}  # gloo aborts the rank that receives more than it expects

PLAIN = [
    Case("plain_ddp", "sleep", "elsewhere"),
    Case("plain_ddp", "debugger", "debugger", needs_input=True),
    Case("plain_ddp", "different", **DIFFERENT),
    Case("plain_ddp", "rank_0", **RANK_0),
    Case("plain_ddp", "stop", **STOPPED),
    Case("plain_ddp", "worker_hang", "data_worker"),
    Case("plain_ddp", "exit_0", "ended", at="", says=ENDED_0),
    Case("plain_ddp", "lone", **both("different_collectives")),
    Case("plain_ddp", "shapes", **REFUSES),
    Case("plain_ddp", "exit_3", **EXIT_CODE),
    Case("plain_ddp", "worker_killed", None, says=KILLED),
]
MORE_PLAIN = [
    Case("plain_ddp", "loop", "elsewhere"),
    Case("plain_ddp", "gil", "elsewhere"),
    Case("plain_ddp", "fifo", "elsewhere"),
    Case("plain_ddp", "dtypes", **REFUSES),
]
SAMESTEP = [
    Case("samestep_run", "sleep", "elsewhere"),
    Case("samestep_run", "rank_0", **RANK_0),
    Case("samestep_run", "worker_hang", "data_worker"),
    Case("samestep_run", "fifo", "elsewhere"),
    Case("samestep_run", "lone", **both("different_collectives", culprits=(1, 0))),  # its own call is first
    Case("samestep_run", "debugger", "debugger", needs_input=True),
    Case("samestep_run", "different", **DIFFERENT),
    Case("samestep_run", "stop", **STOPPED),
    Case("samestep_run", "shapes", **REFUSES),
    Case("samestep_run", "exit_0", None, says=r"rank 1 called sys\.exit\(0\) at faults\.py:\d+ inside of `with Run`"),
    Case("samestep_run", "exit_3", **EXIT_CODE),
    Case("samestep_run", "worker_killed", None, says=KILLED),
]
MORE_SAMESTEP = [
    Case("samestep_run", "dtypes", **REFUSES),
]
LIGHTNING = [
    Case("lightning_trainer", "sleep", "elsewhere"),
    Case("lightning_trainer", "worker_hang", "data_worker"),
]
MORE_LIGHTNING = [
    Case("lightning_trainer", "rank_0", **RANK_0),
    Case("lightning_trainer", "different", **DIFFERENT),
    Case("lightning_trainer", "fifo", "elsewhere"),
    Case("lightning_trainer", "exit_3", **EXIT_CODE),
    Case("lightning_trainer", "stop", **STOPPED),
    Case("lightning_trainer", "debugger", "debugger", needs_input=True),
    Case("lightning_trainer", "worker_killed", None, says=KILLED),
    Case("lightning_trainer", "shapes", **REFUSES),
    Case("lightning_trainer", "dtypes", **REFUSES),
    Case("lightning_trainer", "exit_0", "ended", at="", says=ENDED_0),
]
ACCELERATE = [
    Case("accelerate_loop", "sleep", "elsewhere"),
    Case("accelerate_loop", "worker_hang", "data_worker"),
    Case("accelerate_loop", "rank_0", **RANK_0),
]
MORE_ACCELERATE = [
    Case("accelerate_loop", "different", **DIFFERENT),
    Case("accelerate_loop", "fifo", "elsewhere"),
    Case("accelerate_loop", "exit_3", **EXIT_CODE),
    Case("accelerate_loop", "debugger", "debugger", needs_input=True),
    Case("accelerate_loop", "stop", **STOPPED),
    Case("accelerate_loop", "shapes", **REFUSES),
    Case("accelerate_loop", "dtypes", **REFUSES),
    Case("accelerate_loop", "exit_0", "ended", at="", says=ENDED_0),
    Case("accelerate_loop", "worker_killed", None, says=KILLED),
]


CASES = [*LIGHTNING, *ACCELERATE, *PLAIN, *SAMESTEP]  # those that import for the longest first
AT_A_TIME = 6


def name_of(case: Case) -> str:
    return case.name


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """The launches of the selected tests by case, side by side, since they mostly wait."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is MODULE]
    selected = {item.callspec.params["case"].name for item in tests if "case" in item.fixturenames}
    variables = {**ON_CPU, "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    cases = [case for case in CASES if case.name in selected]
    return {each.case.name: each for each in run_cases(cases, tmp_path_factory.mktemp("runs"), AT_A_TIME, variables)}


@pytest.mark.parametrize("case", PLAIN[:1], ids=name_of)
def test_a_rank_that_sleeps_is_named_with_its_line(launches: dict[str, Launch], case: Case):
    launch = launches[case.name]
    check_launches([launch])
    first = launch.console[launch.console.index("samestep: rank 1") :].splitlines()
    assert first[0].startswith("samestep: rank 1 is holding up rank 0 for ")
    assert first[1].startswith("  rank 0 waits in all_reduce #")
    (line,) = launch.lines("waits")
    waits = f"train.py:{line.rpartition(':')[2]}: loss.backward() # waits"
    assert first[1].endswith(f"(DDP gradients, 3 elements), called from {waits}")
    assert f"(node {os.uname().nodename}, pid {launch.pid(1)}) has not called it; it is at faults.py:" in first[2]
    assert first[2].endswith(": time.sleep(_FOREVER) # fault: sleep")
    assert first[3].startswith("  its last collective was #")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_launcher_names_the_rank_the_line_and_the_reason(launches: dict[str, Launch], case: Case):
    check_launches([launches[case.name]])


@pytest.mark.slow
@IF_ALL
@pytest.mark.parametrize(
    "cases", [MORE_PLAIN, MORE_SAMESTEP, MORE_LIGHTNING, MORE_ACCELERATE], ids=lambda each: each[0].script
)
def test_the_rest_of_the_table(tmp_path: Path, cases: list[Case]):
    check(cases, tmp_path)


@pytest.mark.parametrize(
    ("ends", "end", "ranks_end", "load", "problem"),
    [
        ("launcher", 109.0, 0.0, 0.5, ""),
        ("launcher", 111.0, 0.0, 0.5, "the launcher ended 11.0 s after the timeout, with 1.0 processes per core"),
        ("launcher", 111.0, 0.0, 1.5, ""),  # other tests use the cores
        ("launcher", 116.0, 0.0, 1.5, "the launcher ended 16.0 s after the timeout, with 1.5 processes per core"),
        ("ranks", 140.0, 99.0, 0.5, ""),  # they were restarted, before the timeout
        ("ranks", 140.0, 111.0, 0.5, "the ranks ended 11.0 s after the timeout, with 1.0 processes per core"),
        ("ranks", 140.0, 0.0, 0.5, "the end of the ranks was not seen"),
        ("", 300.0, 0.0, 0.5, ""),
    ],
)
def test_an_end_that_is_late_is_a_problem(tmp_path: Path, ends, end, ranks_end, load, problem):
    call = {"called": 90.0, "timeout": 10.0, "is_pending": True}
    (tmp_path / "kept/hang").mkdir(parents=True)
    (tmp_path / "kept/hang/report-0-1.json").write_text(json.dumps({"ranks": [{"collectives": [call]}]}))
    during = CoreLoad()
    during._samples = [(99.0, 9.0), *((100.0 + second, load) for second in range(20)), (150.0, 9.0)]
    case = Case("plain_ddp", "sleep", ends=ends)
    launch = Launch(case, SimpleNamespace(folder=tmp_path), 0.0, during, end, [], ranks_end)
    assert list(launch._problems_of_time()) == [problem] * bool(problem)


def test_a_hang_in_which_no_rank_waits_measures_no_end_and_is_a_problem(tmp_path: Path):
    launch = Launch(Case("plain_ddp", "sleep", "elsewhere"), SimpleNamespace(folder=tmp_path), 0.0)
    assert list(launch._problems_of_time()) == ["no rank waits for another one in the first report"]
