"""verify ends in time, and leaves no process behind, whatever the ranks of a script do to stay alive."""

import os
import time

import psutil
import pytest

from samestep.verify import verify

pytestmark = pytest.mark.slow

SCRIPT = """\
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def leave_child(folder):
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", folder]
    subprocess.Popen(command, start_new_session=True)


mode, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
workers = 1 if mode == "data workers" else 0
loader = DataLoader(
    data, batch_size=4, sampler=DistributedSampler(data), num_workers=workers, persistent_workers=bool(workers)
)
if mode == "ignores signals":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode == "leaves a child":
    leave_child(folder)
for inputs, targets in loader:
    if mode == "returns early" and rank == 1:
        break
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
if mode in ("ignores signals", "data workers"):
    if mode == "data workers":
        leave_child(folder)
    time.sleep(600)
"""


def left_behind(folder: str) -> list[str]:
    """The command lines of processes that have the folder of the test as an argument, or as their working folder."""
    found = list[str]()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (folder in process.cmdline() or process.cwd().startswith(folder)):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize(
    ("mode", "timeout", "code", "text"),
    [
        ("returns early", 120, 1, "rank 1 has ended while rank 0 calls DDP backward pass"),
        ("ignores signals", 10, 2, "did not end within the time limit"),
        ("data workers", 10, 2, "did not end within the time limit"),
        ("leaves a child", 120, 0, ""),
    ],
)
def test_no_process_is_left_and_the_timeout_holds(interpreters, tmp_path, monkeypatch, mode, timeout, code, text):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    start, folder = time.monotonic(), tmp_path / "worlds"
    verdict = verify("train.py", [mode, str(tmp_path)], interpreters=interpreters, timeout=timeout, keep=folder)
    assert time.monotonic() - start < timeout + 30  # the ranks would sleep for 600 s
    assert verdict.exit_code == code, (verdict.findings, verdict.failure)
    assert text in " ".join([verdict.failure, *(each.summary for each in verdict.findings)])
    assert left_behind(str(tmp_path)) == []
