"""The probe in real ranks of torch: what they wait for, with the lines that called it."""

import socket
import time

import pytest

from samestep.launch.straggler_watch import find_activity
from tests.hang.probed import place, probed
from tests.launch.launched import wait_for

pytestmark = pytest.mark.slow

# Line numbers start after the line that `probed` adds.
DDP_WITH_WORKER = """
import datetime, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index == 40 and dist.get_rank() == 1:
            ready()
            time.sleep(600)
        return torch.ones(10)
def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    for batch in DataLoader(Items(), batch_size=2, num_workers=1, prefetch_factor=1):
        loss = model(batch).sum()
        loss.backward()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
train()
"""
GROUPS = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=12))
group = dist.new_group(timeout=datetime.timedelta(seconds=600))
dist.barrier()
ready()
if dist.get_rank() == 0:
    dist.{call}
time.sleep(600)
"""
START = """
import torch.distributed as dist
if __import__("os").environ["RANK"] == "0":
    dist.init_process_group("gloo")
ready()
time.sleep(600)
"""
RECEIVE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
ready()
if dist.get_rank() == 0:
    dist.recv(torch.ones(3), 1)
time.sleep(600)
"""


@pytest.fixture
def pair(tmp_path):
    """Start two ranks of a script; returns their pids when it has called ready."""
    with probed(tmp_path) as processes:

        def start(code):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            started = [processes.start(code, environ=environ | {"RANK": str(rank)}, wait=False) for rank in range(2)]
            wait_for((tmp_path / "ready1").exists, 240)
            return processes.probe, {rank: process.pid for rank, process in enumerate(started)}

        yield start


def wait_until_waiting(probe, pid, seconds):
    """Ask five times per second, as the launcher does with short timeouts, until a rank has waited for that long."""
    for _ in range(1200):
        time.sleep(0.2)
        found = probe.progress(pid, 10)
        if found is not None and found.waiting >= seconds:
            return found
    raise AssertionError("the rank does not wait")


def test_one_rank_waits_for_gradients_and_the_other_for_a_data_worker(pair):
    probe, pids = pair(DDP_WITH_WORKER)
    progress = wait_until_waiting(probe, pids[0], 6)  # after 5 s the probe reads the flight recorder
    assert progress.timeout == 300
    assert progress.calls > 10
    assert progress.waiting < 300
    elsewhere = probe.progress(pids[1], 10)
    assert (elsewhere.waiting, elsewhere.timeout) == (0, 0)
    assert (progress.is_waiting, elsewhere.is_waiting, elsewhere.is_measured) == (True, False, False)
    assert place(progress.stack) == "script0.py:16 train"
    assert (place(elsewhere.stack), find_activity(elsewhere.stack)) == ("script1.py:14 train", "data")
    assert elsewhere.calls == progress.calls - 1
    waiting, late = probe.collect(pids, {})

    *earlier, pending = waiting.collectives
    assert pending.is_pending
    assert not any(each.is_pending for each in (*earlier, *late.collectives))
    assert (pending.name, pending.shapes, pending.dtypes) == ("all_reduce", [[110]], ["Float"])
    assert (pending.group, pending.ranks, pending.timeout, pending.backend) == ("0", [0, 1], 300, "gloo")
    assert pending.number == late.collectives[-1].number + 1
    assert place(pending.stack) == "script0.py:16 train"
    assert 6 <= time.time() - pending.called < 300
    assert waiting.step_seconds == progress.interval

    assert place(late.process.stacks["main"]) == "script1.py:14 train"
    (worker,) = [child for child in late.children if child.is_data_worker]
    assert place(worker.stacks["main"]) == "script1.py:10 __getitem__"
    assert worker.state == "sleeping"
    assert not late.process.is_data_worker


def test_a_receive_that_gloo_does_not_record(pair):
    probe, pids = pair(RECEIVE)
    progress = wait_until_waiting(probe, pids[0], 2)
    assert (progress.timeout, progress.is_waiting) == (0, True)  # unknown: it is of the group that the call uses
    other = probe.progress(pids[1], 10)
    assert (other.waiting, other.is_waiting) == (0, False)
    waiting, other = probe.collect(pids, {})
    call = waiting.collectives[-1]
    assert (call.name, call.is_p2p, call.is_pending, place(call.stack)) == ("recv", True, True, "script0.py:7 <module>")
    assert not any(each.is_pending for each in other.collectives)
    assert call.timeout == 0


@pytest.mark.parametrize(
    ("call", "timeout", "seconds"),
    [
        ("all_reduce(torch.ones(3), group=group)", 600, 3.7),  # before, the timeout may be that of another group
        ("recv(torch.ones(3), 1, group=group)", 0, 1),
        ("monitored_barrier(group=group)", 0, 1),
    ],
)
def test_a_wait_does_not_have_the_timeout_of_another_group(pair, call, timeout, seconds):
    probe, pids = pair(GROUPS.format(call=call))
    assert wait_until_waiting(probe, pids[0], seconds).timeout == timeout


def test_a_rank_that_waits_for_another_to_start_has_no_known_timeout(pair):
    probe, pids = pair(START)
    progress = wait_until_waiting(probe, pids[0], 1)
    assert (progress.calls, progress.timeout) == (0, 0)
    waiting, late = probe.collect(pids, {})
    (call,) = waiting.collectives
    assert (call.timeout, call.is_pending, place(call.stack)) == (0, True, "script0.py:4 <module>")
    assert late.collectives == []
