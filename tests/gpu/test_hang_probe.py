"""The probe in ranks that use NCCL: a rank that waits for another is seen while it waits, and what it waits for.

Several ranks on one GPU need NCCL 2.30 or newer in the process (LD_PRELOAD).
"""

import socket
import time

import pytest
import torch

from samestep.environment.gpus import nccl_version
from tests.hang.probed import place, probed
from tests.launch.launched import wait_for

# Line numbers start after the line that `probed` adds.
ONE_SLEEPS = """
import datetime, os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=400))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10).to(device))
for step in range(50):
    model(torch.ones(4, 10, device=device)).sum().backward()
    time.sleep(0.05)
torch.cuda.synchronize()
ready()
if rank == 1:
    time.sleep(600)
values = torch.ones(7, device=device)
dist.all_reduce(values)
values.sum().item()
"""


def test_a_rank_that_waits_over_nccl_is_seen_while_it_waits(tmp_path):
    if nccl_version() < (2, 30) and torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks on one GPU need NCCL 2.30 or newer, this is {nccl_version()}: set LD_PRELOAD")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    with probed(tmp_path) as processes:
        started = [processes.start(ONE_SLEEPS, environ=environ | {"RANK": str(rank)}, wait=False) for rank in range(2)]
        pids = {rank: process.pid for rank, process in enumerate(started)}
        both = [tmp_path / f"ready{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() for path in both) or any(each.poll() is not None for each in started), 240)
        assert all(path.exists() for path in both), [each.communicate()[0] for each in started if each.poll()]
        progress = None
        for _ in range(60):
            time.sleep(1)
            progress = processes.probe.progress(pids[0], 10)
            if progress is not None and progress.waiting >= 8:
                break
        assert progress is not None
        assert 8 <= progress.waiting < 400
        assert progress.timeout == 400
        assert processes.probe.progress(pids[1], 10).waiting == 0
        waiting, sleeping = processes.probe.collect(pids, {})
        pending = [each for each in waiting.collectives if each.is_pending]
        assert [(each.name, each.shapes, each.backend, each.ranks) for each in pending] == [
            ("all_reduce", [[7]], "nccl", [0, 1])
        ]
        assert place(pending[0].stack) == "script0.py:16 <module>"
        assert place(waiting.process.stacks["main"]) == "script0.py:17 <module>"
        assert not any(each.is_pending for each in sleeping.collectives)
        assert sleeping.collectives[-1].number == pending[0].number - 1
        assert place(sleeping.process.stacks["main"]) == "script1.py:14 <module>"
        assert processes.probe.end(pids[0], seconds=2, exit_code=9)
        assert started[0].wait(60) == 9  # although its GPU is busy
