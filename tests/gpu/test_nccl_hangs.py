"""Faults injected for real over NCCL in four kinds of scripts: the rank, its line, and the end.

Two ranks share a GPU, as in test_nccl.py: docs/gpu_tests.md says how to run them.
"""

from pathlib import Path

import pytest

from tests.gpu.test_nccl import missing_for
from tests.hang.injected_faults import Case, check, stop_rank_1
from tests.hang.test_slow_ranks import DOES, check_named

AT_A_TIME = 4  # ranks that wait keep the GPU busy
TIMEOUT = 20.0
VARIABLES = {"HANG_DEVICE": "cuda:0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
WAITS = "waits( over NCCL)?"  # the main thread may already be at the next line that needs the result


def cases(script: str, waits: str) -> list[Case]:
    def case(fault: str, kind: str | None, **options) -> Case:
        return Case(script, fault, kind, timeout=TIMEOUT, **{"waits": waits, **options})

    return [
        case("sleep", "elsewhere"),
        case("different", "different_collectives", culprits=(0, 1), waits="others: different"),
        case("shapes", "different_shapes", culprits=(0, 1), waits=""),
        case("stop", "stopped", at="", during=stop_rank_1),
        case("worker_hang", "data_worker"),
        case("exit_3", "", says=r"rank 1 +pid \d+ +exit code 3  <- first failure", code=3),
    ]


PLAIN = [*cases("plain_ddp", WAITS), Case("plain_ddp", "exit_0", "ended", at="", waits=WAITS, timeout=TIMEOUT)]
SAMESTEP = cases("samestep_run", "")  # several lines may wait for the GPU
LIBRARIES = [
    Case(script, fault, kind, timeout=TIMEOUT, **{"waits": "", **options})
    for script in ("lightning_trainer", "accelerate_loop")
    for fault, kind, options in (
        ("sleep", "elsewhere", {}),
        ("different", "different_collectives", {"culprits": (0, 1), "waits": "others: different"}),
        ("shapes", "different_shapes", {"culprits": (0, 1)}),
        ("stop", "stopped", {"at": "", "during": stop_rank_1}),
        ("worker_hang", "data_worker", {}),
    )
]


@pytest.fixture(autouse=True)
def _two_ranks_over_nccl(_on_a_gpu_in_a_separate_folder):
    if reason := missing_for(2):
        pytest.skip(reason)


@pytest.mark.parametrize("table", [PLAIN, SAMESTEP, LIBRARIES], ids=["plain_ddp", "samestep_run", "libraries"])
def test_the_launcher_names_the_rank_and_its_line_and_ends_the_run(tmp_path: Path, table: list[Case]):
    launches = check(table, tmp_path, AT_A_TIME, VARIABLES)
    measured = [each.case.name for each in launches if each.seconds_after_timeout is not None]
    assert len(measured) >= 5, measured  # `check` fails if one of them ends too late


def test_a_slow_rank_of_a_script_that_does_not_measure_it_is_named_once(tmp_path: Path):
    scripts = [
        *(("plain_ddp", fault) for fault in DOES),
        ("lightning_trainer", "slow_step"),
        ("accelerate_loop", "slow_step"),
    ]
    slow = [Case(script, fault, None, code=0, timeout=60.0, ends="") for script, fault in scripts]
    for launch in check(slow, tmp_path, AT_A_TIME, VARIABLES):
        check_named(launch)
