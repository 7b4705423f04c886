"""Placements `offload` and `disk`: order of blocks, memory on the device, prefetch, and files that change."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samestep import Run
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from samestep.teacher.offload import place_offloaded, place_on_disk
from samestep.teacher.options import TeacherOptions
from tests.teachers import TinyLM, random_tokens, save, tiny_lm


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


class OutOfOrder(nn.Module):
    """Calls its blocks out of order and some of them twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        for at in (3, 3, 0, 4, 1, 2, 0):
            x = self.blocks[at](x)
        return x


@pytest.mark.parametrize("placement", ["offload", "disk"])
def test_offloaded_blocks_can_be_called_in_any_order(run, placement):
    with torch.random.fork_rng():
        plain = OutOfOrder().eval()
    teacher = run.teacher(OutOfOrder, weights=save(plain, "one.safetensors"), placement=placement)
    for value in range(3):
        assert torch.equal(teacher(torch.full((2, 4), float(value))), plain(torch.full((2, 4), float(value))))


class UsesWeightsDirectly(nn.Module):
    """Uses the weights of a block without calling it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return nn.functional.linear(self.blocks[0](x), self.blocks[1].weight)


class NestedCalls(nn.Module):
    """Calls a block inside another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Caller() for _ in range(4))
        self.blocks[0].others = [self.blocks[2]]

    def forward(self, x):
        return self.blocks[0](x)


class Caller(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.others = []

    def forward(self, x):
        x = super().forward(x)
        for other in self.others:
            x = other(x)
        return x


@pytest.mark.parametrize("placement", ["offload", "disk"])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            UsesWeightsDirectly,
            "uses 'weight' of a layer in 'blocks.1' without calling 'blocks.1', and the",
        ),
        (NestedCalls, "'blocks.2' is called inside 'blocks.0', and both would use the same memory"),
    ],
)
def test_weights_that_are_not_on_the_device_are_never_used(run, placement, build, message):
    with torch.random.fork_rng():
        weights = save(build(), "one.safetensors")
    teacher = run.teacher(build, weights=weights, placement=placement)
    with pytest.raises(TeacherError, match=message):
        teacher(torch.ones(2, 4))


def test_an_error_in_an_offloaded_forward_is_raised_unchanged(run):
    teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="offload")
    teacher(random_tokens())
    with pytest.raises(RuntimeError, match="must match the size"):
        teacher(random_tokens()[:, :3])
    assert torch.equal(teacher(random_tokens()), tiny_lm()(random_tokens()))


def test_offload_holds_two_blocks_on_the_device(run):
    plain = tiny_lm(blocks=6)
    frozen = FrozenModel(lambda: TinyLM(blocks=6), open_weights(save(plain, "one.safetensors")))
    layer = sum(p.nbytes for p in plain.blocks[0].parameters())
    for place in (place_offloaded, place_on_disk):
        placed = place(run._lifecycle.context, frozen, TeacherOptions())
        placed(random_tokens())
        held = {slot.memory.data_ptr(): slot.memory.nbytes for slot in (block.slot for block in placed._blocks)}
        assert len(held) == 2
        assert sum(held.values()) < 2.1 * layer
        placed.close()


def test_the_next_block_is_copied_while_one_computes(run):
    frozen = FrozenModel(TinyLM, open_weights(save(tiny_lm(), "one.safetensors")))
    placed = place_on_disk(run._lifecycle.context, frozen, TeacherOptions())
    seen = []
    placed._module.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(placed._blocks[1].slot.block))
    placed(random_tokens())
    placed.close()
    assert seen == [1]


def test_a_file_that_shrinks_during_the_run_is_reported(run):
    path = save(tiny_lm(blocks=6), "one.safetensors")
    teacher = run.teacher(lambda: TinyLM(blocks=6), weights=path, placement="disk")
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
    for _ in range(2):
        with pytest.raises(TeacherError, match=r"ended .* bytes too early: it has changed since the teacher was"):
            teacher(random_tokens())


def deep():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.parametrize("placement", ["offload", "disk"])
def test_a_teacher_works_again_after_its_files_were_missing_for_a_while(tmp_path, placement):
    module, path, moved = deep(), tmp_path / "teacher.safetensors", tmp_path / "moved"
    save_file(module.state_dict(), path)
    rows = torch.randn(2, 4)
    with Run(global_batch=2, folder=tmp_path / "run") as run:
        teacher = run.teacher(deep, weights=path, placement=placement)
        path.rename(moved)
        for _ in range(2):
            with pytest.raises((TeacherError, FileNotFoundError)):
                teacher(rows)
        moved.rename(path)
        for _ in range(2):
            assert torch.equal(teacher(rows), module(rows))
