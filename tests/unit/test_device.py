"""Which device and backend a rank gets, decided from what torch sees."""

import pytest
import torch

from samestep.distributed.device import Accelerators, choose_device
from samestep.environment.world import World
from samestep.errors import WorldError

NOTHING = Accelerators(cuda=0, mps=False)


def world(size, local_rank=0, local_size=None):
    return World(rank=local_rank, size=size, local_rank=local_rank, local_size=local_size or size)


@pytest.mark.parametrize(
    ("place", "seen", "wish", "device", "backend"),
    [
        (world(1), NOTHING, None, "cpu", "none"),
        (world(2), NOTHING, None, "cpu", "gloo"),
        (world(1), Accelerators(0, True), None, "mps", "none"),
        (world(2), Accelerators(0, True), None, "cpu", "gloo"),
        (world(1), Accelerators(2, False), None, "cuda:0", "none"),
        (world(2, local_rank=1), Accelerators(2, False), None, "cuda:1", "nccl"),
        (world(2, local_rank=1), Accelerators(2, False), "gloo", "cuda:1", "gloo"),
        (world(8, local_rank=1, local_size=2), Accelerators(2, False), None, "cuda:1", "nccl"),
        (world(3, local_rank=2), Accelerators(2, False), None, "cuda:0", "gloo"),
    ],
)
def test_device_and_backend_follow_from_ranks_and_gpus(place, seen, wish, device, backend):
    choice = choose_device(place, seen, wish)
    assert (choice.device, choice.backend) == (torch.device(device), backend)
    assert choice.reason


def test_ranks_that_share_a_gpu_are_warned():
    assert choose_device(world(2), Accelerators(2, False), None).warning is None
    warning = choose_device(world(3), Accelerators(2, False), None).warning
    assert warning == "3 ranks share 2 GPU(s): gloo connects them, slower than NCCL on a GPU each"


def test_backends_that_cannot_serve_are_refused():
    with pytest.raises(WorldError, match="backend='mpi' is not one that samestep uses: use 'gloo' or 'nccl'"):
        choose_device(world(2), NOTHING, "mpi")
    with pytest.raises(WorldError, match="backend='nccl' needs a CUDA device and torch sees none: leave backend out"):
        choose_device(world(2), NOTHING, "nccl")
    with pytest.raises(WorldError, match=r"cannot serve 3 ranks on 2 GPU\(s\).*--nproc-per-node 2"):
        choose_device(world(3), Accelerators(2, False), "nccl")
