"""Which device and backend a rank uses."""

import pytest
import torch

from samestep.distributed.device import choose_device
from samestep.environment.world import World
from samestep.errors import WorldError

NONE = (0, False)  # no CUDA device, no Apple GPU


def make_world(size, local_rank=0, local_size=None):
    return World(rank=local_rank, size=size, local_rank=local_rank, local_size=local_size or size)


@pytest.mark.parametrize(
    ("world", "accelerators", "requested", "device", "backend"),
    [
        (make_world(1), NONE, None, "cpu", "none"),
        (make_world(2), NONE, None, "cpu", "gloo"),
        (make_world(1), (0, True), None, "mps", "none"),
        (make_world(2), (0, True), None, "cpu", "gloo"),
        (make_world(1), (2, False), None, "cuda:0", "none"),
        (make_world(2, local_rank=1), (2, False), None, "cuda:1", "nccl"),
        (make_world(2, local_rank=1), (2, False), "gloo", "cuda:1", "gloo"),
        (make_world(8, local_rank=1, local_size=2), (2, False), None, "cuda:1", "nccl"),
        (make_world(3, local_rank=2), (2, False), None, "cuda:0", "gloo"),
    ],
)
def test_device_and_backend_follow_from_ranks_and_gpus(world, accelerators, requested, device, backend):
    choice = choose_device(world, *accelerators, requested)
    assert (choice.device, choice.backend) == (torch.device(device), backend)
    assert choice.reason


def test_ranks_that_share_a_gpu_give_a_warning():
    assert choose_device(make_world(2), 2, False, None).warning is None
    warning = choose_device(make_world(3), 2, False, None).warning
    assert warning == "3 ranks share 2 GPU(s): samestep uses gloo, which is slower than NCCL with one GPU per rank"


def test_unusable_backends_are_rejected():
    with pytest.raises(WorldError, match="backend='mpi' is not supported: use 'gloo' or 'nccl'"):
        choose_device(make_world(2), *NONE, "mpi")
    with pytest.raises(
        WorldError, match="backend='nccl' needs a CUDA device and torch sees none: omit backend to use gloo"
    ):
        choose_device(make_world(2), *NONE, "nccl")
    with pytest.raises(WorldError, match=r"needs one GPU per rank, got 3 ranks on 2 GPU\(s\): use --nproc-per-node 2"):
        choose_device(make_world(3), 2, False, "nccl")
