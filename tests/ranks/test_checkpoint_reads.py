"""What each rank reads when it restores: its slices of sharded tensors, and of the others a share of the bytes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from samestep import Run
from samestep.checkpoint import tensor_storage
from samestep.checkpoint.tensor_storage import broadcast_tensors, divide_reads


class Net(nn.Module):
    """Layers of different sizes, and buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 20) for size in (8, 12, 20, 30))
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))


class CountingFile:
    """A safetensors file that counts the bytes that are read from it, without the states of the generators."""

    read = 0

    def __init__(self, *arguments, **options):
        self._file = safe_open(*arguments, **options)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *exception):
        return self._file.__exit__(*exception)

    def _count(self, key, tensor):
        CountingFile.read += 0 if key.startswith("rng/") else tensor.nbytes
        return tensor

    def get_tensor(self, key):
        return self._count(key, self._file.get_tensor(key))

    def get_slice(self, key):
        slices = self._file.get_slice(key)
        return mock.MagicMock(__getitem__=lambda _, part: self._count(key, slices[part]))


def full(tensor):
    """On the CPU; not by full_tensor(), which crashes in torch 2.11 with gloo and tensors of a GPU."""
    if hasattr(tensor, "placements"):
        slices = [None] * dist.get_world_size()
        dist.all_gather_object(slices, tensor.to_local().cpu())
        tensor = torch.cat(slices)  # FSDP shards dimension 0
    return tensor.detach().cpu().clone().contiguous()


def run_parts(run, strategy):
    net = Net()
    if strategy != "fsdp":  # FSDP needs contiguous weights
        net.conv.to(memory_format=torch.channels_last)
    model = run.wrap(net, None if run.size == 1 else strategy)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save(folder, strategy):
    """Save random values; return them."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model, optimizer = run_parts(run, strategy)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for buffer in model.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))
        for number, parameter in enumerate(model.parameters()):
            optimizer.state[parameter] = {"momentum_buffer": parameter.detach() * 3 + number}
        checkpoint.save()
        return state(model, optimizer)


def state(model, optimizer):
    moments = [full(optimizer.state[parameter]["momentum_buffer"]) for parameter in model.parameters()]
    return [full(tensor) for tensor in model.state_dict().values()] + moments


def restore(folder, strategy, bucket=None):
    """Restore; return the values, the bytes read, and the bytes of this rank's slices and of what is not sharded."""
    CountingFile.read = 0
    patch = mock.patch.multiple(
        tensor_storage, safe_open=CountingFile, _BUCKET_BYTES=bucket or tensor_storage._BUCKET_BYTES
    )
    with patch, Run(global_batch=8, seed=0, folder=folder) as run:
        model, optimizer = run_parts(run, strategy)
        run.checkpoint(folder, model=model, optimizer=optimizer)
        moments = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        tensors = [*model.state_dict().values(), *moments]
        own = sum(tensor.to_local().nbytes for tensor in tensors if hasattr(tensor, "placements"))
        in_full = sum(tensor.nbytes for tensor in tensors if not hasattr(tensor, "placements"))
        return state(model, optimizer), CountingFile.read, own, in_full


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "saved_as"), [(1, None), (3, "fsdp"), (2, "ddp")])
def test_with_ddp_every_byte_is_read_once_and_every_rank_has_the_same_values(ranks, tmp_path, saved_on, saved_as):
    expected, *_ = ranks(saved_on, save, tmp_path, saved_as)
    for size, bucket in ((1, None), (2, None), (3, 4000)):
        answers = ranks(size, restore, tmp_path, "ddp", bucket)
        total = sum(tensor.nbytes for tensor in expected)
        assert sum(read for _, read, _, _ in answers) == total
        largest = max(tensor.nbytes for tensor in expected)
        assert all(total / size - largest <= read <= total / size + largest for _, read, _, _ in answers)
        for values, *_ in answers:
            assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


def test_with_fsdp_every_rank_reads_its_slices_and_a_share_of_what_is_not_sharded(ranks, tmp_path):
    expected, *_ = ranks(2, save, tmp_path, "ddp")
    answers = ranks(2, restore, tmp_path, "fsdp")
    shares = [read - own for _, read, own, _ in answers]
    assert all(own > 0 for _, _, own, _ in answers)
    assert all(share >= 0 for share in shares)
    assert sum(shares) == answers[0][3]
    for values, *_ in answers:
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


def restore_with_an_unreadable_file(folder):
    """Restore on ranks of which the second cannot read from the disk after the files were verified."""
    error = mock.patch.object(tensor_storage, "safe_open", side_effect=OSError(5, "Input/output error"))
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model, optimizer = run_parts(run, "ddp")
        if run.rank == 1:
            error.start()
        try:
            run.checkpoint(folder, model=model, optimizer=optimizer)
        finally:
            mock.patch.stopall()


def test_a_file_that_one_rank_cannot_read_is_an_error_on_every_rank(ranks, tmp_path):
    ranks(1, save, tmp_path, None)
    for text in ranks.errors(2, restore_with_an_unreadable_file, tmp_path):
        assert "CheckpointError: rank 1: " in text
        assert "step-00000000 cannot be restored: " in text
        assert "Input/output error" in text


def broadcast(sizes, bucket):
    """Fill a tensor of each dtype and layout on its reader, and send it; return all values of this rank."""
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int16, torch.uint8)
    with Run(global_batch=4) as run, mock.patch.object(tensor_storage, "_BUCKET_BYTES", bucket):
        tensors, expected = {}, {}
        for number, size in enumerate(sizes):
            dtype = dtypes[number % len(dtypes)]
            value = (torch.arange(size * 3).view(size, 3) % (number + 2)).to(dtype)
            value = value.t() if number % 2 else value
            tensors[f"t{number}"], expected[f"t{number}"] = torch.zeros(value.shape).to(dtype), value
            if number % 2:
                tensors[f"t{number}"] = torch.zeros(value.t().shape).to(dtype).t()
        readers = divide_reads({name: tensor.nbytes for name, tensor in tensors.items()}, run.size)
        for name, tensor in tensors.items():
            if readers[name] == run.rank:
                tensor.copy_(expected[name])
        broadcast_tensors(tensors, readers, run._comm)
        return [name for name in tensors if not torch.equal(tensors[name].double(), expected[name].double())]


@pytest.mark.parametrize("bucket", [1, 500, 1 << 20])
def test_tensors_of_any_dtype_and_layout_reach_all_ranks(ranks, bucket):
    assert ranks(3, broadcast, [0, 1, 7, 3, 50, 20, 11, 0, 5, 1, 90, 2], bucket) == [[], [], []]
