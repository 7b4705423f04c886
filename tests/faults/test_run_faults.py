"""Mistakes in a training script: the exit code and the sentence."""

import pytest

from tests.faults.harness import Fault, cases, check

FAULTS = [
    Fault(
        "global batch of zero",
        "global_batch=0 must be",
        script="""
            from samestep import Run
            with Run(global_batch=0):
                pass
        """,
    ),
    Fault(
        "one rank raises",
        "ValueError: broken on rank 1",
        ranks=2,
        script="""
            from samestep import Run
            with Run(global_batch=4) as run:
                if run.rank == 1:
                    raise ValueError("broken on rank 1")
                run.barrier()
        """,
    ),
    Fault("unknown command", "samestep: unknown command nonsense: use one of", code=2, command="samestep nonsense"),
]


@pytest.mark.slow
@cases(FAULTS)
def test_a_fault_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)
