"""A rank that sleeps while the other waits for it over NCCL: the launcher reports the rank and the line that sleeps.

Several ranks on one GPU need NCCL 2.30 or newer in the process (LD_PRELOAD).
"""

import re
import time

import pytest
import torch

from samestep.environment.gpus import nccl_version
from tests.launch.launched import start

SLEEPS = """
    import time

    import torch
    from torch.utils.data import TensorDataset

    from samestep import Run

    with Run(global_batch=4, step_timeout=20) as run:
        model = run.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard = run.shard(TensorDataset(torch.randn(400, 2)), shuffle=False, num_workers=0)
        for epoch in shard.epochs(1):
            for step in epoch:
                if step.number == 5 and run.rank == 1:
                    open("sleeps", "w").close()
                    time.sleep(300)  # the cause
                for (rows,) in step:
                    step.mean(model(rows).square().mean(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"loss": step.loss})
"""


def test_the_rank_that_sleeps_is_the_cause_soon_after_the_timeout(tmp_path):
    if nccl_version() < (2, 30) and torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks on one GPU need NCCL 2.30 or newer, this is {nccl_version()}: set LD_PRELOAD")
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ended = start(tmp_path, SLEEPS, "--nproc-per-node", "2", "train.py", env=variables).finish(300)
    seconds = time.time() - (tmp_path / "sleeps").stat().st_mtime
    assert ended.code == 1, ended.err
    report = ended.err[ended.err.rindex("samestep: rank 1 is holding up rank 0") :]
    assert re.search(r"it is at train\.py:\d+: time\.sleep\(300\) # the cause", report), ended.err
    rows = r"  rank 1 +pid \d+ +ended by the launcher  <- the cause\n  rank 0 +pid \d+ +victim: "
    assert re.search(rows, report), ended.err
    assert seconds < 60, f"{seconds:.0f} s after it began to sleep\n{ended.err}"
