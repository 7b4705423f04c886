"""`samestep hang` on live runs of a plain DDP script, and `samestep run --on-hang`."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hang.injected_faults import IF_ALL, Case, Launch, check

pytestmark = pytest.mark.slow

REPORT_KEYS = {"version", "summary", "cause", "ranks"}
CAUSE_KEYS = {
    "kind", "culprits", "waiting", "seconds", "headline", "sentences", "collective", "call", "lateness", "remedy"
}  # fmt: skip
RANK_KEYS = {
    "rank", "node", "process", "children", "collectives", "collected", "exit_code", "last_lines", "step_seconds",
    "gpu_percent", "full_disk", "oom_kills", "error", "user_frame",
}  # fmt: skip
GENEROUS = 120.0


def hang(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "hang", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GENEROUS, check=False)


def ask(launch: Launch, kind: str) -> dict[str, Any]:
    """The report of `samestep hang --json` once it finds a cause of this kind; the wait must last for some seconds."""
    end = time.monotonic() + GENEROUS
    while True:
        printed = hang("kept", "--json", folder=launch.folder)
        assert printed.returncode == 0, printed.stderr
        report = json.loads(printed.stdout)
        if report["cause"] is not None and report["cause"]["kind"] == kind:
            return report
        assert time.monotonic() < end, report["summary"]


def look_at_nap(launch: Launch) -> None:
    """Ask in all ways, then let the run continue."""
    report = ask(launch, "elsewhere")
    assert report["version"] == 1
    assert report.keys() == REPORT_KEYS
    assert report["cause"].keys() == CAUSE_KEYS
    assert [each.keys() for each in report["ranks"]] == [RANK_KEYS, RANK_KEYS]
    assert (report["cause"]["culprits"], report["cause"]["waiting"]) == ([1], [0])
    for rank, mark in enumerate(("waits", "fault: nap")):
        frame = report["ranks"][rank]["user_frame"]
        assert f"{frame['file']}:{frame['line']}" in launch.lines(mark)
    by_pid = hang(str(launch.pid(0)), folder=launch.folder)
    assert by_pid.stdout.startswith("samestep: rank 1 is holding up rank 0 for "), by_pid
    assert "time.sleep(0.1) # fault: nap" in by_pid.stdout
    assert f"rank 0 (node {report['ranks'][0]['node']}, pid {launch.pid(0)}): " in by_pid.stdout
    (launch.folder / "wake").touch()


def look_at_slow(launch: Launch) -> None:
    """Each step takes as long as rank 1, which is not stopped."""
    report = ask(launch, "slow")
    assert report["cause"]["culprits"] == [1]
    frames = [each["frame"] for each in report["cause"]["sentences"] if each["frame"]]
    assert {f"{each['file']}:{each['line']}" for each in frames} & launch.lines("waits"), report["summary"]
    assert "rank 1 is slow, not stuck" in report["summary"]
    (launch.folder / "wake").touch()


def slow_cases(*scripts: str) -> list[Case]:
    return [Case(script, "slow", None, code=0, timeout=60.0, during=look_at_slow, ends="") for script in scripts]


@IF_ALL
def test_samestep_hang_names_a_slow_rank_of_lightning_and_accelerate(tmp_path: Path):
    for launch in check(slow_cases("lightning_trainer", "accelerate_loop"), tmp_path):
        assert "is done" in launch.console


def test_samestep_hang_explains_a_live_run_which_then_continues(tmp_path: Path):
    nap = Case("plain_ddp", "nap", None, code=0, timeout=300.0, during=look_at_nap, ends="")
    for launch in check([nap, *slow_cases("plain_ddp", "samestep_run")], tmp_path):
        assert "is done" in launch.console
        assert "holding up" not in launch.console  # the launcher itself has not reported a hang
        ended = hang("kept", folder=launch.folder)
        assert ended.returncode != 0
        assert "the run in kept has ended: its logs are in kept/logs" in ended.stderr


def test_on_hang(tmp_path: Path):
    """`stop` and `restart` end ranks that cannot continue before the timeout, `report` leaves it to torch."""
    different = {"kind": None, "culprits": (0, 1), "timeout": 12.0}
    cases = {
        "stop": Case(
            "plain_ddp", "different", code=1, options=("--on-hang", "stop", "--max-restarts", "3"), **different
        ),
        "report": Case("samestep_run", "different", code=1, options=("--on-hang", "report"), **different),
        "restart": Case(  # the restarted ranks train to the end
            "plain_ddp",
            "once",
            code=0,
            options=("--on-hang", "restart", "--max-restarts", "1"),
            ends="ranks",
            **different,
        ),
    }
    launches = dict(zip((each.name for each in cases.values()), cases, strict=True))
    ended = {launches[each.case.name]: each for each in check(list(cases.values()), tmp_path)}
    for policy, launch in ended.items():
        assert [each["cause"]["kind"] for each in launch.reports] == ["different_collectives"], policy
        assert launch.seconds_after_timeout is not None, policy  # `check` fails if it is too long
        assert ("Timed out waiting" in launch.console) == (policy == "report"), launch.console
    assert "rank(s) on " in ended["stop"].console
    assert not (ended["stop"].folder / "kept/logs/attempt-1").exists()
    assert (ended["restart"].folder / "kept/logs/attempt-1").exists()
