"""Checkpoints of tensors on a GPU: pinned host memory of the exact size, and restored values."""

import warnings
from mmap import PAGESIZE

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.checkpoint.tensor_storage import HostStaging
from tests.ranks import test_checkpoint_reads as reads

COUNT, VALUES = 24, 300_000  # 1.14 MiB each, which torch's pinned memory would round up to 2 MiB


def tensors(value):
    on_gpu = {f"t{number}": torch.full((VALUES,), value + number, device="cuda") for number in range(COUNT)}
    return {**on_gpu, "strided": torch.arange(12.0, device="cuda").view(3, 4).t() + value, "cpu": torch.tensor([value])}


def check(staging, given):
    found = {entry.name: entry.load() for entry in staging.entries}
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor.cpu()), name
        assert found[name].is_pinned() == tensor.is_cuda, name
    return {name: tensor.data_ptr() for name, tensor in found.items()}


def test_tensors_are_copied_to_pinned_memory_of_their_size_which_is_kept():
    staging, first, second = HostStaging(0), tensors(1.0), tensors(50.0)
    staging.stage(first, single_process=True)
    before = check(staging, first)
    needed = sum(tensor.nbytes for tensor in first.values() if tensor.is_cuda)
    assert needed <= staging._pinned_memory._memory.nbytes < needed + 64 * len(first) + PAGESIZE
    assert staging.has_plan(second)
    staging.stage_again(second)
    assert check(staging, second) == before


def test_memory_is_unpinned_before_it_is_freed():
    for value in range(5):  # memory that is pinned twice is an error of CUDA
        staging, given = HostStaging(0), tensors(float(value))
        staging.stage(given, single_process=True)
        check(staging, given)
        larger = {**given, "more": torch.ones(10 * VALUES, device="cuda")}
        staging.stage(larger, single_process=True)
        check(staging, larger)
        del staging
    torch.cuda.synchronize()


def test_every_save_has_the_values_of_its_step(tmp_path):
    with Run(global_batch=4, folder=tmp_path) as run:
        model = run.wrap(nn.Linear(700, 700))
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint = run.checkpoint(tmp_path, model=model, optimizer=optimizer, keep=9)
        for step in range(3):
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoint.save(step=step)
            with torch.no_grad():
                model.weight.fill_(-1)  # while the thread writes
        checkpoint.wait()
    with Run(global_batch=4, folder=tmp_path) as run:
        model = run.wrap(nn.Linear(700, 700))
        run.checkpoint(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
        assert bool((model.weight == 2).all())


def on_one_gpu(function, *arguments):
    """Run a function on a rank that shares the GPU with others."""
    warnings.filterwarnings("ignore", ".*ranks share 1 GPU.*")
    return function(*arguments)


@pytest.mark.parametrize(("saved_as", "restored_as"), [("ddp", "ddp"), ("fsdp", "ddp"), ("ddp", "fsdp")])
def test_every_byte_is_read_once_and_sent_to_the_other_ranks(ranks, tmp_path, saved_as, restored_as):
    expected, *_ = ranks(2, on_one_gpu, reads.save, tmp_path, saved_as, timeout=100)
    for size in (2, 3):
        answers = ranks(size, on_one_gpu, reads.restore, tmp_path, restored_as, timeout=100)
        assert sum(read - own for _, read, own, _ in answers) == answers[0][3]
        for values, *_ in answers:
            assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
