"""A slow rank of a script that does not measure it is named by the launcher once, with its line and what it does."""

import re
from pathlib import Path

import pytest

from tests.hang.injected_faults import IF_ALL, Case, Launch, check

pytestmark = pytest.mark.slow

LIBRARIES = ["lightning_trainer", "accelerate_loop"]
DOES = {"slow_step": "computing", "slow_data": "reading data"}


def cases(*scripts: str) -> list[Case]:
    return [Case(script, fault, None, code=0, timeout=60.0, ends="") for script in scripts for fault in DOES]


def check_named(launch: Launch) -> None:
    console, fault = launch.console, launch.case.fault
    assert console.count("rank 1 is slow") == 1, console
    assert re.search(r"samestep: rank 1 is slow: rank 0 waits for it for about \d+% of the time\.\n", console), console
    named = f"it spends more time {DOES[fault]} than rank 0: for "
    shown = re.search(rf"  {named}\d+% of the time it is at (\w+\.py:\d+): .* # fault: {fault}\n", console)
    assert shown, console
    assert {f"{launch.folder}/{shown[1]}"} == launch.lines(f"fault: {fault}"), console
    assert "is done" in console


def test_a_slow_rank_of_plain_ddp_is_named_once_by_the_launcher_and_that_of_a_run_by_the_run(tmp_path: Path):
    measured = Case("samestep_run", "slow_step", None, code=0, timeout=60.0, ends="")
    for launch in check([*cases("plain_ddp"), measured], tmp_path):
        if launch.case is not measured:
            check_named(launch)
        else:
            assert "rank 1 is slow" not in launch.console
            assert launch.console.count("SamestepWarning: rank 1 makes the others wait for") == 1, launch.console


@IF_ALL
def test_a_slow_rank_of_lightning_and_accelerate_is_named_once(tmp_path: Path):
    for launch in check(cases(*LIBRARIES), tmp_path):
        check_named(launch)
