"""Teachers on a GPU: every placement is bit-equal with the plain module, and copies overlap with computation."""

import gc
import statistics
import time
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from samestep.teacher.offload import file_reader, offload_blocks, pin, place_offloaded, place_on_disk, unpin
from samestep.teacher.options import TeacherOptions
from samestep.teacher.resident import copy_to_shared_memory
from tests.teachers import TinyLM, random_tokens, save, tiny_lm

DEVICE = torch.device("cuda", 0)
PLACEMENTS = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["one.safetensors", "one.pt"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_is_bit_equal_with_the_plain_module(run, placement, form, dtype):
    weights = save(tiny_lm(blocks=5), form)
    plain = FrozenModel(lambda: TinyLM(blocks=5), open_weights(weights)).load(
        torch.device("cpu") if placement == "cpu" else DEVICE, dtype
    )
    options = {"device_map": {"": "cuda:0", "blocks.1": "cuda:0"}} if placement == "custom" else {}
    teacher = run.teacher(lambda: TinyLM(blocks=5), weights=weights, placement=placement, dtype=dtype, **options)
    for seed in range(5):
        inputs = random_tokens(seed=seed)
        found = teacher(tokens=inputs.to(DEVICE))
        assert found.device == DEVICE
        with torch.no_grad():
            expected = plain(inputs.to(plain.positions.device))
        assert torch.equal(found.cpu(), expected.cpu())


@dataclass
class OwnOutputs:
    """Outputs of a user's class."""

    logits: object
    label: str


class LMWithOwnOutputs(TinyLM):
    """Returns its logits in an object."""

    def forward(self, tokens):
        return OwnOutputs(super().forward(tokens), "a")


@pytest.mark.parametrize("few", [None, 3])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "sharded", "served", "cached"])
def test_outputs_are_on_the_gpu_and_keep_their_class(run, placement, few):
    weights = save(tiny_lm(), "one.safetensors")
    plain = FrozenModel(TinyLM, open_weights(weights)).load(torch.device("cpu") if placement == "cpu" else DEVICE)
    options = {"device_map": {"": "cuda:0"}} if placement == "custom" else {}
    teacher = run.teacher(LMWithOwnOutputs, weights=weights, placement=placement, top_k=few, **options)
    for epoch in run.shard(TensorDataset(random_tokens(8)), micro_batch=4, num_workers=0).epochs(2):
        for step in epoch:
            for (inputs,) in step:
                for found in (teacher(inputs), teacher.submit(inputs).result()):
                    # a step enables autocast for the student; a teacher computes in the dtype of its weights
                    with torch.no_grad(), torch.autocast("cuda", enabled=False):
                        expected = plain(inputs.to(plain.positions.device)).to(DEVICE)
                    assert type(found) is OwnOutputs
                    assert found.label == "a"
                    given = found.logits if few is None else found.logits.values
                    assert given.device == DEVICE
                    assert torch.equal(given, expected if few is None else expected.topk(few).values)


def test_a_device_map_can_mix_cpu_and_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = tiny_lm()
    mapped = {"": "cuda:0", "blocks.1": "cpu"}
    with Run(global_batch=4, precision="fp32") as run:  # without TF32, which is less exact than the CPU
        teacher = run.teacher(TinyLM, weights=save(plain, "one.safetensors"), placement="custom", device_map=mapped)
        assert torch.allclose(teacher(random_tokens().to(DEVICE)).cpu(), plain(random_tokens()), atol=1e-4)


def test_a_teacher_larger_than_the_gpu_is_rejected(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    for placement in ("gpu", "balanced", "sequential", "offload", "disk"):
        with pytest.raises(TeacherError, match=r"1000 B are free|900 B are free"):
            run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement=placement)


class Deep(nn.Module):
    """Blocks of 134 MB in bf16."""

    def __init__(self, width=8192, blocks=10):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


@pytest.fixture
def deep(tmp_path):
    """Weights of Deep that differ everywhere, so that a block in the wrong slot is detected."""
    with torch.device("meta"):
        names = list(Deep().state_dict())
    generator = torch.Generator(DEVICE).manual_seed(0)
    state = {
        name: (torch.randn(8192, 8192, generator=generator, device=DEVICE) / 100).bfloat16().cpu() for name in names
    }
    torch.save(state, tmp_path / "deep.pt")
    save_file(state, tmp_path / "deep.safetensors")
    return tmp_path / "deep.safetensors"


def median_seconds(call, rounds=5):
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def test_shared_memory_can_be_pinned(run):
    frozen = FrozenModel(TinyLM, open_weights(save(tiny_lm(), "one.safetensors")))
    copy = copy_to_shared_memory(run._lifecycle.context, frozen, None, writable=True)
    assert pin(copy.memory)
    assert copy.get("positions").is_pinned()
    assert not pin(copy.memory)  # it is pinned already: the driver refuses, without effect on later work
    assert torch.equal(copy.get("positions").to(DEVICE).cpu(), tiny_lm().positions)
    unpin(copy.memory)


def test_offload_overlaps_copies_and_is_bit_equal(run, deep):
    resident = FrozenModel(Deep, open_weights(deep)).load(DEVICE)
    placed = place_offloaded(run._lifecycle.context, FrozenModel(Deep, open_weights(deep)), TeacherOptions())
    x = torch.randn(16384, 8192, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = resident(x)
        for _ in range(4):  # without synchronization: a slot overwritten too early changes the outputs
            found = placed(x)
        assert torch.equal(found, expected)
        with_prefetch = median_seconds(lambda: placed(x))
        placed.prefetch = False
        assert torch.equal(placed(x), expected)
        without_prefetch = median_seconds(lambda: placed(x))
        computing = median_seconds(lambda: resident(x))
    placed.close()
    times = (1e3 * with_prefetch, 1e3 * without_prefetch, 1e3 * computing)
    print("offload {:.1f} ms, without overlap {:.1f} ms, computing {:.1f} ms".format(*times))
    # the copies of a pass take less time than its matrix products, so offload must not be much slower
    assert with_prefetch < 1.25 * computing


@pytest.mark.parametrize("file", ["deep.safetensors", "deep.pt"])
def test_disk_and_staged_copies_are_bit_equal(run, deep, file):
    weights = open_weights(deep.parent / file)
    resident = FrozenModel(Deep, weights).load(DEVICE)
    x = torch.randn(64, 8192, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = resident(x)
        frozen = FrozenModel(Deep, weights)
        context, read = run._lifecycle.context, file_reader(frozen)
        for placed in (
            place_on_disk(context, frozen, TeacherOptions()),
            offload_blocks(context, frozen, TeacherOptions(), "offload", host=None, read=read, location="staged"),
        ):
            for _ in range(4):
                found = placed(x)
            assert torch.equal(found, expected)
            placed.close()


def test_offload_holds_two_blocks_on_the_gpu(run, deep):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    placed = place_offloaded(run._lifecycle.context, FrozenModel(Deep, open_weights(deep)), TeacherOptions())
    block = 2 * 8192 * 8192
    assert torch.cuda.memory_allocated(DEVICE) - before < 2.1 * block
    with torch.no_grad():
        placed(torch.randn(1, 8192, device=DEVICE, dtype=torch.bfloat16))
    placed.close()
    del placed
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before < 0.5 * block
