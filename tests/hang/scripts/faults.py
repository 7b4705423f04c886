"""What goes wrong in step 5 of the scripts: each faulty line ends with a comment that names the fault."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info

STEP, SAMPLES, BATCH = 5, 400, 4
TIMEOUT = float(os.environ["HANG_TIMEOUT"])
DEVICE = os.environ["HANG_DEVICE"]
SIZE = 4 if DEVICE == "cpu" else 2**22  # NCCL completes small collectives of different sizes
_FOREVER = 600.0


def rank() -> int:
    return int(os.environ["RANK"])


def share_gpu() -> None:
    """Let a library that selects the GPU by the local rank use the first one on every rank."""
    if DEVICE != "cpu":
        os.environ["LOCAL_RANK"] = "0"


def meet() -> None:
    """Wait until all ranks have imported their modules, so that the timeout does not have to allow for it."""
    Path(f"up-{rank()}").write_text(str(os.getpid()))
    while len(list(Path().glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


class Rows(Dataset[torch.Tensor]):
    """Random rows; rank 1 does not get those after the first steps."""

    def __init__(self, fault: str) -> None:
        self._fault, self._reads = fault, 0  # of this process
        self._rows = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self._reads += 1
        if self._fault == "slow_data" and rank() == 1:
            time.sleep(0.4)  # fault: slow_data
        if rank() == 1 and self._reads > BATCH * STEP:
            if self._fault == "fifo":
                Path("fifo").read_text()  # fault: fifo
            if self._fault == "worker_hang" and get_worker_info() is not None:
                time.sleep(_FOREVER)  # fault: worker_hang
            if self._fault == "worker_killed" and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._rows[index]


def num_workers(fault: str) -> int:
    return 1 if fault.startswith("worker_") else 0


def disturb(fault: str, step: int) -> None:
    """Called in every step, before the forward pass."""
    if fault == "slow" and rank() == 1 and not Path("wake").exists():
        time.sleep(0.5)  # fault: slow
    if fault == "slow_step" and rank() == 1:
        time.sleep(1.6)  # fault: slow_step
    if step != STEP:
        return
    Path(f"disturbed-{rank()}").touch()
    while fault == "interrupted" and not Path("interrupted").exists():  # the network, by the test
        time.sleep(0.05)
    if fault == "rank_0" and rank() == 0:
        time.sleep(_FOREVER)  # fault: rank_0
    elif rank() == 1:
        _disturb_rank_1(fault)
    elif fault == "different" or (fault == "once" and _is_first_attempt()):
        dist.all_reduce(torch.ones(SIZE, device=DEVICE))  # others: different
    if fault == "shapes":
        dist.all_reduce(torch.ones(4 + SIZE * rank(), device=DEVICE))  # fault: shapes
    if fault == "dtypes":
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank() == 1 else torch.float32))  # fault: dtypes


def _is_first_attempt() -> bool:
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def _disturb_rank_1(fault: str) -> None:
    _call_or_end(fault)
    if fault == "sleep":
        time.sleep(_FOREVER)  # fault: sleep
    elif fault == "nap":
        while not Path("wake").exists():
            time.sleep(0.1)  # fault: nap
    elif fault == "loop":
        count = 0
        while True:  # fault: loop
            count += 1  # fault: loop
    elif fault == "gil":
        sum(iter(int, 1))  # fault: gil
    elif fault == "debugger":
        breakpoint()  # fault: debugger  # noqa: T100
    elif fault == "full_disk":
        _save()
    elif fault == "memory":
        _fill_memory()


def _call_or_end(fault: str) -> None:
    if fault == "stop":
        time.sleep(_FOREVER)  # until the test stops this process
    elif fault == "different" or (fault == "once" and _is_first_attempt()):
        if DEVICE == "cpu":
            dist.barrier()  # fault: different
        else:
            dist.broadcast(torch.ones(SIZE, device=DEVICE), 0)  # fault: different
    elif fault == "lone":
        dist.all_reduce(torch.ones(1, device=DEVICE))  # fault: lone
    elif fault == "exit_0":
        sys.exit(0)  # fault: exit_0
    elif fault == "exit_3":
        os._exit(3)


def _save() -> None:
    with Path("disk/checkpoint.pt").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(2**20))
            except OSError:
                time.sleep(1.0)  # fault: full_disk


def _fill_memory() -> None:
    rows = list[bytes]()
    while True:
        rows.append(b"x" * 2**24)
