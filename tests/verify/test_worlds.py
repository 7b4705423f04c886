"""How verify runs a script: hangs and crashes are findings, everything ends in time, and GPUs are mapped to the CPU.

The frameworks are in the corpus: FSDP2 in clean-13, mp.spawn in clean-14, Lightning in clean-15 and clean-16,
Accelerate in clean-17 and Fabric in clean-18.
"""

import os
import time

import psutil
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from samestep.findings import Finding
from samestep.verify import verify, worlds
from samestep.verify.recorder import cpu_batchnorm, data_observer, model_observer
from samestep.verify.verification import fold

SCRIPT = """\
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(mode, device):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator))
    torch.manual_seed(0)
    network = nn.Linear(4, 1)
    if mode == "cuda":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), network))
    model = DDP(network.to(device), device_ids=None if device == "cpu" else [device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    if mode == "same data":
        loader = DataLoader(data, batch_size=4, shuffle=True)
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        differ(mode, dist.get_rank())
        if mode.startswith("file"):
            exchange(mode, dist.get_rank())
        dist.all_reduce(torch.zeros(2, device=device))


def differ(mode, rank):
    if mode == "other collective" and rank == 1:
        dist.barrier()
    if mode == "sleep" and rank == 1:
        time.sleep(600)
    if mode == "sleep everywhere":
        time.sleep(600)
    if mode == "abort" and rank == 1:
        os.abort()
    if mode == "exit" and rank == 1:
        sys.exit(3)
    if mode == "error" and rank == 1:
        raise ValueError("no cache for this rank")


def exchange(mode, rank):
    if rank == 0:
        with open("vocabulary.txt", "w") as file:
            file.write("a b c")
    if mode == "file, broadcast":
        dist.broadcast(torch.zeros(1), 0)
    if mode == "file, store":
        store = dist.distributed_c10d._get_default_store()
        store.set("written", "yes") if rank == 0 else store.wait(["written"])
    if mode == "file, broadcast of another rank":
        dist.broadcast(torch.zeros(1), 1)
    if rank == 1:
        while not os.path.exists("vocabulary.txt"):
            time.sleep(0.01)
        open("vocabulary.txt").close()


def worker(rank, size, mode):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(mode, "cpu")


if __name__ == "__main__":
    mode = sys.argv[1]
    if len(sys.argv) > 2:
        mp.spawn(worker, args=(2, mode), nprocs=2)
    elif mode == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        train(mode, torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
        train(mode, "cpu")
"""


def line(text: str) -> int:
    """The line of the script with this text."""
    (number,) = [number for number, each in enumerate(SCRIPT.splitlines(), 1) if text in each]
    return number


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def location(finding):
    return finding.location.line if finding.location else None


@pytest.fixture
def forks():
    """What finds the processes that a test has left below the interpreters: the ranks."""

    def below() -> set[psutil.Process]:
        children = psutil.Process(os.getpid()).children()
        return {child for process in children for child in process.children(recursive=True)}

    before = below()
    return lambda: sorted(below() - before, key=lambda process: process.pid)


@pytest.mark.slow
def test_ranks_that_call_different_collectives_are_ended_and_both_lines_are_named(interpreters, script, forks):
    verdict = verify(script, ["other collective"], interpreters=interpreters)
    (finding,) = verdict.findings
    assert (verdict.exit_code, finding.code, finding.ranks) == (1, "SS301", (0, 1))
    barrier, reduce = line("dist.barrier()"), line("dist.all_reduce(")
    assert location(finding) == barrier
    assert finding.evidence == (
        f"rank 0 calls all_reduce at train.py:{reduce}: dist.all_reduce(torch.zeros(2, device=device))",
        f"rank 1 calls barrier at train.py:{barrier}: dist.barrier()",
    )
    assert [each.line for each in finding.related] == [reduce]
    assert forks() == []


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_collective_is_found_at_its_line(interpreters, script, forks, monkeypatch):
    monkeypatch.setattr(worlds, "_IDLE_SECONDS", 6.0)
    monkeypatch.setattr(worlds, "_IDLE_SHARE", 0.0)
    start = time.monotonic()
    verdict = verify(script, ["sleep"], interpreters=interpreters)
    assert time.monotonic() - start < 250  # the default time limit is 300 s
    (finding,) = verdict.findings
    sleep = line('"sleep" and rank == 1') + 1
    assert f"rank 1 is at train.py:{sleep}: time.sleep(600)" in finding.evidence
    (elsewhere,) = [each for each in finding.follows if each.code == "SS306"]
    assert (location(elsewhere), elsewhere.ranks) == (sleep, (1,))
    assert forks() == []


@pytest.mark.slow
def test_the_timeout_ends_a_script_that_does_nothing(interpreters, script, forks):
    start = time.monotonic()
    verdict = verify(script, ["sleep everywhere"], interpreters=interpreters, timeout=8)
    assert time.monotonic() - start < 60
    assert (verdict.exit_code, verdict.findings) == (2, ())
    assert verdict.failure == "the script did not end within the time limit (--timeout)"
    assert forks() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "text", "statement"),
    [
        ("abort", "rank 1 is ended by SIGABRT at train.py:{}; one rank does not", "os.abort()"),
        ("exit", "rank 1 ends with exit code 3 at train.py:{}; one rank does not", "sys.exit(3)"),
        ("error", "rank 1 fails with ValueError: no cache for this rank; one rank does not", "raise ValueError"),
    ],
)
def test_a_rank_that_ends_with_an_error_is_a_finding_at_its_line(interpreters, script, mode, text, statement):
    verdict = verify(script, [mode], interpreters=interpreters)
    (finding,) = verdict.findings
    assert (finding.code, finding.summary) == ("SS901", text.format(line(statement)))
    assert (location(finding), list(finding.ranks)) == (line(statement), [1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "codes"),
    [("file, broadcast", []), ("file, store", []), ("file, broadcast of another rank", ["SS502"])],
)
def test_a_rank_that_waits_for_the_writer_may_read_its_file(interpreters, script, mode, codes):
    verdict = verify(script, [mode], interpreters=interpreters)
    assert [each.code for each in verdict.findings] == codes
    assert verdict.failure == ""


def test_torch_has_the_private_names_that_the_recorder_observes():
    iterator = getattr(dataloader, data_observer.ITERATOR)
    assert all(callable(getattr(iterator, name, None)) for name in data_observer.ITERATOR_METHODS)
    loss = mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
    assert loss.grad_fn._saved_reduction == model_observer._MEAN
    assert callable(getattr(DistributedDataParallel, cpu_batchnorm.HANDLE, None))


@pytest.mark.slow
def test_a_script_that_spawns_its_ranks_is_compared_between_them(interpreters, script):
    verdict = verify(script, ["same data", "spawn"], interpreters=interpreters)
    assert [(each.code, location(each)) for each in verdict.findings] == [("SS101", line("shuffle=True"))]
    assert "one rank was not compared: the script always starts 2 ranks" in verdict.scope
    assert verdict.worlds == {"many": 2}


@pytest.mark.slow
def test_a_script_for_nccl_and_gpus_runs_on_the_cpu_which_is_said_once(interpreters, script):
    verdict = verify(script, ["cuda"], interpreters=interpreters)
    assert (verdict.findings, verdict.failure) == ((), "")
    text = "the script asks for GPUs: it was run on the CPU, with gloo instead of NCCL"
    assert verdict.scope.count(text) == 1
    assert verdict.worlds == {"many": 2, "one": 1, "nodes": 2}
    # one rank normalizes the global batch, as SyncBatchNorm does on several
    assert "compared with one rank: the gradients of 2 steps for the same samples and weights" in verdict.scope


@pytest.mark.slow
def test_the_scope_says_how_much_was_compared(interpreters, script):
    verdict = verify(script, ["correct"], interpreters=interpreters)
    assert verdict.findings == ()
    between, with_one = verdict.scope
    assert between.startswith("compared between 2 ranks: 1 epoch with 16 samples, 2 optimizer steps, ")
    assert with_one == "compared with one rank: the gradients of 2 steps for the same samples and weights"


def finding(code):
    return Finding(code, "name", "error", None, "summary", "consequence", "repair")


def test_consequences_are_folded_below_their_cause():
    cause, other, consequence = finding("SS101"), finding("SS501"), finding("SS206")
    (first, second) = fold([cause, other, consequence])
    assert (first.code, [each.code for each in first.follows]) == ("SS101", ["SS206"])
    assert (second.code, list(second.follows)) == ("SS501", [])
