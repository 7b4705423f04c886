"""Teachers on a GPU: every placement gives the bits of the plain module, and streaming runs beside computing."""

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
from samestep.teacher.offload import Source, open_reader, pin, place_offloaded, place_on_disk, stream, unpin
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.single_device import share_memory
from samestep.teacher.weight_files import open_weights
from tests.teachers import Speaker, save, speaker, words

DEVICE = torch.device("cuda", 0)
PLACEMENTS = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


def ground_of(run):
    return Ground(run._comm, run.device, run.folder, run.print, run.once)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["one.safetensors", "one.pt"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_gives_the_bits_of_the_plain_module(run, placement, form, dtype):
    weights = save(speaker(blocks=5), form)
    plain = FrozenModel(lambda: Speaker(blocks=5), open_weights(weights)).load(
        torch.device("cpu") if placement == "cpu" else DEVICE, dtype
    )
    options = {"device_map": {"": "cuda:0", "blocks.1": "cuda:0"}} if placement == "custom" else {}
    teacher = run.teacher(lambda: Speaker(blocks=5), weights=weights, placement=placement, dtype=dtype, **options)
    for seed in range(5):
        inputs = words(seed=seed)
        found = teacher(words=inputs.to(DEVICE))
        assert found.device == DEVICE
        with torch.no_grad():
            expected = plain(inputs.to(plain.places.device))
        assert torch.equal(found.cpu(), expected.cpu())


@dataclass
class Said:
    """Outputs of a class of one's own."""

    logits: object
    note: str


class Sayer(Speaker):
    """Gives its logits inside an object."""

    def forward(self, words):
        return Said(super().forward(words), "a")


@pytest.mark.parametrize("few", [None, 3])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "sharded", "served", "cached"])
def test_outputs_come_home_to_the_gpu_in_their_own_class(run, placement, few):
    weights = save(speaker(), "one.safetensors")
    plain = FrozenModel(Speaker, open_weights(weights)).load(torch.device("cpu") if placement == "cpu" else DEVICE)
    options = {"device_map": {"": "cuda:0"}} if placement == "custom" else {}
    teacher = run.teacher(Sayer, weights=weights, placement=placement, top_k=few, **options)
    for epoch in run.shard(TensorDataset(words(8)), micro_batch=4, num_workers=0).epochs(2):
        for step in epoch:
            for (inputs,) in step:
                for found in (teacher(inputs), teacher.ahead(inputs).result()):
                    # a step has autocast on for the student; a teacher computes in the dtype of its weights
                    with torch.no_grad(), torch.autocast("cuda", enabled=False):
                        expected = plain(inputs.to(plain.places.device)).to(DEVICE)
                    assert type(found) is Said
                    assert found.note == "a"
                    given = found.logits if few is None else found.logits.values
                    assert given.device == DEVICE
                    assert torch.equal(given, expected if few is None else expected.topk(few).values)


def test_layers_on_the_cpu_and_on_the_gpu_work_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = speaker()
    mapped = {"": "cuda:0", "blocks.1": "cpu"}
    with Run(global_batch=4, precision="fp32") as run:  # without TF32, or the CPU would be the more exact of both
        teacher = run.teacher(Speaker, weights=save(plain, "one.safetensors"), placement="custom", device_map=mapped)
        assert torch.allclose(teacher(words().to(DEVICE)).cpu(), plain(words()), atol=1e-4)


def test_a_teacher_larger_than_the_gpu_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    for placement in ("gpu", "balanced", "sequential", "offload", "disk"):
        with pytest.raises(TeacherError, match=r"1000 B are free|900 B are free"):
            run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement=placement)


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
    """Weights of Deep that differ everywhere, so that a block in the wrong slot is seen."""
    with torch.device("meta"):
        names = list(Deep().state_dict())
    generator = torch.Generator(DEVICE).manual_seed(0)
    state = {
        name: (torch.randn(8192, 8192, generator=generator, device=DEVICE) / 100).bfloat16().cpu() for name in names
    }
    torch.save(state, tmp_path / "deep.pt")
    save_file(state, tmp_path / "deep.safetensors")
    return tmp_path / "deep.safetensors"


def middle(call, rounds=5):
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def test_shared_memory_can_be_pinned(run):
    frozen = FrozenModel(Speaker, open_weights(save(speaker(), "one.safetensors")))
    copy = share_memory(ground_of(run), frozen, None, writable=True)
    assert pin(copy.memory)
    assert copy.get("places").is_pinned()
    assert not pin(copy.memory)  # pinned already: refused, and the refusal harms nothing that follows
    assert torch.equal(copy.get("places").to(DEVICE).cpu(), speaker().places)
    unpin(copy.memory)


def test_offload_overlaps_and_stays_bit_equal(run, deep):
    resident = FrozenModel(Deep, open_weights(deep)).load(DEVICE)
    placed = place_offloaded(ground_of(run), FrozenModel(Deep, open_weights(deep)), TeacherOptions())
    x = torch.randn(16384, 8192, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = resident(x)
        for _ in range(4):  # many passes without waiting in between: a slot that is overwritten too early would show
            found = placed(x)
        assert torch.equal(found, expected)
        ahead = middle(lambda: placed(x))
        placed._ahead = False
        assert torch.equal(placed(x), expected)
        alone = middle(lambda: placed(x))
        computing = middle(lambda: resident(x))
    placed.close()
    print(f"offload {1e3 * ahead:.1f} ms, without overlap {1e3 * alone:.1f} ms, computing {1e3 * computing:.1f} ms")
    # the copies of a pass take less than its products: a pass that streams must not be longer than one that does not
    assert ahead < 1.25 * computing


@pytest.mark.parametrize("file", ["deep.safetensors", "deep.pt"])
def test_disk_and_staged_copies_are_bit_equal(run, deep, file):
    weights = open_weights(deep.parent / file)
    resident = FrozenModel(Deep, weights).load(DEVICE)
    x = torch.randn(64, 8192, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = resident(x)
        frozen = FrozenModel(Deep, weights)
        staged = Source(None, open_reader(frozen), "staged")
        ground = ground_of(run)
        for placed in (
            place_on_disk(ground, frozen, TeacherOptions()),
            stream(ground, frozen, TeacherOptions(), staged, "offload", None),
        ):
            for _ in range(4):
                found = placed(x)
            assert torch.equal(found, expected)
            placed.close()


def test_streaming_holds_two_blocks_on_the_gpu(run, deep):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    placed = place_offloaded(ground_of(run), FrozenModel(Deep, open_weights(deep)), TeacherOptions())
    block = 2 * 8192 * 8192
    assert torch.cuda.memory_allocated(DEVICE) - before < 2.1 * block
    with torch.no_grad():
        placed(torch.randn(1, 8192, device=DEVICE, dtype=torch.bfloat16))
    placed.close()
    del placed
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before < 0.5 * block
