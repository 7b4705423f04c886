"""Which device and backend the ranks use."""

import doctest
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from samestep.distributed import process_group
from samestep.distributed.device import (
    BackendChoice,
    RankDevice,
    agree_on_backend,
    choose_backend,
    choose_device,
    describe_rank,
)
from samestep.environment import gpus
from samestep.environment.world import World, shares_gpus
from samestep.errors import WorldError

NONE = (0, False)  # no CUDA device, no Apple GPU
OLD, NEW = (2, 28, 9), (2, 32, 3)  # before and after NCCL allowed several ranks per GPU


def make_world(size, local_rank=0, local_size=None):
    return World(rank=local_rank, size=size, local_rank=local_rank, local_size=local_size or size)


def make_ranks(*gpus, nccl=OLD, **fields):
    """One rank per GPU name; "" for a rank without one."""
    return [RankDevice(rank, gpu, nccl, **fields) for rank, gpu in enumerate(gpus)]


@pytest.mark.parametrize(
    ("world", "accelerators", "requested", "device"),
    [
        (make_world(1), NONE, None, "cpu"),
        (make_world(2), NONE, None, "cpu"),
        (make_world(1), (0, True), None, "mps"),
        (make_world(2), (0, True), None, "cpu"),
        (make_world(1), (2, False), None, "cuda:0"),
        (make_world(2, local_rank=1), (2, False), None, "cuda:1"),
        (make_world(2, local_rank=1), (2, False), "gloo", "cuda:1"),
        (make_world(8, local_rank=1, local_size=2), (2, False), None, "cuda:1"),
        (make_world(3, local_rank=2), (2, False), None, "cuda:0"),
        (make_world(4, local_rank=3), (1, False), "nccl", "cuda:0"),  # srun --gpus-per-task=1
    ],
)
def test_the_device_follows_from_the_local_rank_and_the_visible_gpus(world, accelerators, requested, device):
    assert choose_device(world, *accelerators, requested) == torch.device(device)


@pytest.mark.parametrize(
    ("devices", "backend", "reason"),
    [
        (make_ranks("GPU-a"), "none", "a single rank needs no backend"),
        (make_ranks(""), "none", "a single rank needs no backend"),
        (make_ranks("", "", nccl=()), "gloo", "2 ranks on the CPU: no GPU is visible"),
        # torchrun, where every rank sees all GPUs; srun --gpus-per-task=1; CUDA_VISIBLE_DEVICES per rank
        (make_ranks("GPU-a", "GPU-b"), "nccl", "one GPU for each of the 2 ranks"),
        (make_ranks("GPU-a", "GPU-b", "GPU-c", "GPU-d"), "nccl", "one GPU for each of the 4 ranks"),
        (make_ranks("GPU-a", "GPU-b", requested="nccl"), "nccl", "one GPU for each of the 2 ranks"),
        (make_ranks("GPU-a", "GPU-b", requested="gloo"), "gloo", "backend='gloo' was passed to Run"),
        # instances of one GPU
        (make_ranks("MIG-a1", "MIG-a2"), "nccl", "one GPU for each of the 2 ranks"),
        (
            make_ranks("GPU-a", "GPU-a", nccl=NEW, allows_sharing=True),
            "nccl",
            "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, which NCCL 2.32.3 allows with NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
        (
            make_ranks("GPU-a", "GPU-a", nccl=(2, 30), allows_sharing=True, requested="nccl"),
            "nccl",
            "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, which NCCL 2.30 allows with NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
        (
            make_ranks("GPU-a", "GPU-a", nccl=NEW),
            "gloo",
            "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, and NCCL_MULTI_RANK_GPU_ENABLE is not 1",
        ),
        (
            make_ranks("GPU-a", "GPU-b", "GPU-a", allows_sharing=True),
            "gloo",
            "3 ranks share 2 GPU(s): ranks 0, 2 use GPU-a, and NCCL 2.28.9 does not allow it",
        ),
        # also if two launchers on one machine count as two nodes
        (
            make_ranks("GPU-a", "GPU-a"),
            "gloo",
            "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, and NCCL 2.28.9 does not allow it",
        ),
        (
            make_ranks(*(["GPU-a"] * 5 + ["GPU-b"] * 5)),
            "gloo",
            "10 ranks share 2 GPU(s): ranks 0, 1, 2, 3, ... use GPU-a and 1 more GPU(s), and NCCL 2.28.9 does not "
            "allow it",
        ),
        (make_ranks("GPU-a", "GPU-b", nccl=()), "gloo", "torch has no NCCL on ranks 0, 1"),
    ],
)
def test_the_backend_follows_from_the_gpus_of_all_ranks(devices, backend, reason):
    choice = choose_backend(devices)
    assert (choice.backend, choice.reason) == (backend, reason)


def test_one_rank_that_does_not_allow_sharing_is_enough_for_gloo():
    first, second = make_ranks("GPU-a", "GPU-a", nccl=NEW, allows_sharing=True)
    assert choose_backend([first, replace(second, allows_sharing=False)]).backend == "gloo"
    assert choose_backend([first, replace(second, nccl=OLD)]).backend == "gloo"


def test_gloo_on_gpus_gives_a_warning_with_the_reason():
    assert choose_backend(make_ranks("GPU-a", "GPU-b")).warning is None
    assert choose_backend(make_ranks("GPU-a", "GPU-a", nccl=NEW, allows_sharing=True)).warning is None
    assert choose_backend(make_ranks("GPU-a", "GPU-a")).warning == (
        "2 ranks share 1 GPU(s): ranks 0, 1 use GPU-a, and NCCL 2.28.9 does not allow it: samestep uses gloo; it is "
        "slower than NCCL with one GPU per rank, or than NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1"
    )
    first, second = make_ranks("GPU-a", "GPU-b")
    assert choose_backend([first, replace(second, nccl=())]).warning == (
        "torch has no NCCL on rank 1: samestep uses gloo; install a build of torch with NCCL"
    )


@pytest.mark.parametrize("requested", [None, "gloo", "nccl"])
@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["GPU-a", ""], "a GPU is visible to 1 of 2 ranks, but not to rank 1: check"),
        (["", "GPU-a", ""], "a GPU is visible to 1 of 3 ranks, but not to ranks 0, 2: check"),
    ],
)
def test_ranks_with_and_without_a_gpu_are_an_error(names, text, requested):
    with pytest.raises(WorldError, match=f"^{text}") as raised:
        choose_backend(make_ranks(*names, requested=requested))
    assert str(raised.value).endswith(
        ": check CUDA_VISIBLE_DEVICES and the GPUs that each node allocates; to train on the CPU, hide the GPUs of all "
        "ranks with CUDA_VISIBLE_DEVICES=-1"
    )


def test_unusable_backends_are_rejected():
    with pytest.raises(WorldError, match="backend='mpi' is not supported: use 'gloo' or 'nccl'"):
        choose_device(make_world(2), *NONE, "mpi")
    needs = "backend='nccl' needs a CUDA device and torch sees none"
    with pytest.raises(WorldError, match=f"{needs}: omit backend"):
        choose_device(make_world(1), *NONE, "nccl")
    assert choose_device(make_world(2), *NONE, "nccl") == torch.device("cpu")  # all ranks raise together, later
    with pytest.raises(WorldError, match=f"{needs} on any of the 2 ranks: omit backend to use gloo"):
        choose_backend(make_ranks("", "", requested="nccl"))
    with pytest.raises(
        WorldError,
        match=r"backend='nccl' needs one GPU per rank, but 2 ranks share 1 GPU\(s\): ranks 0, 1 use GPU-a, and "
        r"NCCL 2\.28\.9 does not allow it: use --nproc-per-node with one rank per GPU, or NCCL 2\.30 or newer with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1, or omit backend to use gloo",
    ):
        choose_backend(make_ranks("GPU-a", "GPU-a", requested="nccl"))
    with pytest.raises(
        WorldError,
        match="backend='nccl' was passed to Run, but torch has no NCCL on ranks 0, 1: install a build of torch with "
        "NCCL, or omit backend to use gloo",
    ):
        choose_backend(make_ranks("GPU-a", "GPU-b", nccl=(), requested="nccl"))
    first, second = make_ranks("GPU-a", "GPU-b")
    with pytest.raises(
        WorldError,
        match=r"rank 0 has Run\(backend=None\) and rank 1 has Run\(backend='gloo'\): pass the same backend on all",
    ):
        choose_backend([first, replace(second, requested="gloo")])


def agree(ranks):
    """What each rank gets, if all agree at the same time: a choice or an error."""
    store, outcomes = dist.HashStore(), {}

    def run(own):
        try:
            outcomes[own.rank] = agree_on_backend(store, len(ranks), own, store.wait)
        except WorldError as error:
            outcomes[own.rank] = str(error)

    threads = [threading.Thread(target=run, args=(own,)) for own in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(len(ranks))]


def test_all_ranks_agree_on_one_choice():
    assert (
        agree(make_ranks("GPU-a", "GPU-b", "GPU-c")) == [BackendChoice("nccl", "one GPU for each of the 3 ranks")] * 3
    )
    shared = agree(make_ranks("GPU-a", "GPU-a"))
    assert shared[0] == shared[1]
    assert shared[0].is_shared


def test_all_ranks_raise_the_same_error():
    errors = agree(make_ranks("GPU-a", "GPU-a", "GPU-a", requested="nccl"))
    assert errors[0].startswith("backend='nccl' needs one GPU per rank, but 3 ranks share 1 GPU(s)")
    assert errors == errors[:1] * 3


def test_a_rank_on_the_cpu_has_no_gpu():
    assert describe_rank(make_world(2, local_rank=1), torch.device("cpu"), "gloo") == RankDevice(1, requested="gloo")


def test_several_ranks_per_gpu_are_allowed_by_a_variable():
    assert shares_gpus({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    assert not shares_gpus({"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert not shares_gpus({})


def test_the_version_and_the_names_of_gpus_are_parsed():
    for module in (gpus, process_group):
        assert doctest.testmod(module).failed == 0
    assert gpus.gpu_name("5ba3", "MIG-GPU-5ba3/1/0", 0) == "MIG-GPU-5ba3/1/0"
    assert gpus.gpu_name("GPU-5ba3", "0,1", 0) == "GPU-5ba3"
    assert gpus.parse_nccl_version(0) == ()


@pytest.mark.parametrize(
    ("existing", "backend", "added"),
    [
        (None, "gloo", "gloo"),
        (None, "nccl", None),
        ("cpu:gloo,cuda:nccl", "nccl", None),
        ("cuda:nccl", "nccl", "cpu:gloo,cuda:nccl"),  # dist.init_process_group("nccl")
        ("cpu:gloo,cuda:gloo", "nccl", "cpu:gloo,cuda:nccl"),  # dist.init_process_group("gloo")
        ("cuda:nccl", "gloo", "gloo"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
    ],
)
def test_what_an_existing_group_lacks_is_added(existing, backend, added):
    assert process_group.backends_to_add(existing, backend) == added
