"""Teachers in one process: every placement returns the outputs of the plain module."""

import copy
import io

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samestep import Run
from samestep.errors import CommunicationError, TeacherError
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from samestep.teacher.options import TeacherOptions
from samestep.teacher.resident import DeviceBudget, place_in_host_memory, place_on_devices, split_evenly, split_in_order
from tests.teachers import TinyLM, random_tokens, save, tiny_lm

CPU = torch.device("cpu")
LOCAL_PLACEMENTS = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")
FILE_FORMATS = ("shards", *(pytest.param(form, marks=pytest.mark.slow) for form in ("one.safetensors", "one.pt")))


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


def open_with(run, placement, weights, build=TinyLM, **options):
    if placement == "custom":
        options["device_map"] = {"": "cpu", "blocks": "cpu", "blocks.1.mlp": "cpu"}
    return run.teacher(build, weights=weights, placement=placement, **options)


@pytest.mark.parametrize("form", FILE_FORMATS)
@pytest.mark.parametrize("placement", LOCAL_PLACEMENTS)
def test_every_placement_returns_the_outputs_of_the_plain_module(run, placement, form):
    plain = tiny_lm()
    teacher = open_with(run, placement, save(plain, form, shards=3))
    for seed in range(3):
        assert torch.equal(teacher(tokens=random_tokens(seed=seed)), plain(random_tokens(seed=seed)))
    assert teacher.placement == placement
    assert teacher.describe().startswith(f"{placement}: ")


@pytest.mark.parametrize("placement", LOCAL_PLACEMENTS)
def test_dtype_converts_the_weights_like_module_to(run, placement):
    plain = tiny_lm().to(torch.bfloat16)
    for block in plain.blocks:
        block.frequencies = torch.arange(block.frequencies.numel()) / block.frequencies.numel()
    teacher = open_with(run, placement, save(tiny_lm(), "one.safetensors"), dtype=torch.bfloat16)
    for _ in range(2):
        found = teacher(random_tokens())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, plain(random_tokens()))


def test_a_run_that_has_not_started_cannot_open_a_teacher():
    with pytest.raises(CommunicationError, match="this run is not started: use `with Run"):
        Run(global_batch=4).teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="cpu")


@pytest.mark.parametrize("placement", ["gpu", "served"])
def test_a_failed_call_names_the_dtypes_of_weights_and_inputs_if_they_differ(run, placement):
    save_file(nn.Linear(3, 2).state_dict(), "one.safetensors")
    teacher = run.teacher(lambda: nn.Linear(3, 2), weights="one.safetensors", placement=placement, dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, TeacherError), match="dtype") as caught:
        teacher(torch.ones(4, 3))
    assert caught.value.__notes__ == [
        "the teacher's weights are torch.bfloat16, but its inputs are torch.float32: pass inputs with "
        ".to(torch.bfloat16), or run.teacher(..., dtype=torch.float32)"
    ]
    assert teacher(torch.ones(4, 3).to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, TeacherError)) as caught:
        teacher(torch.ones(4, 7).to(torch.bfloat16))
    assert not getattr(caught.value, "__notes__", [])


def test_outputs_have_no_gradient_and_can_be_used_in_a_loss(run):
    teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"))
    found = teacher(random_tokens())
    assert not found.requires_grad
    student = nn.Linear(31, 31)
    (student(found) * found).sum().backward()  # backward keeps the outputs of the teacher
    assert student.weight.grad is not None


def test_opening_a_teacher_does_not_change_the_rng_state(run):
    weights = save(tiny_lm(), "one.safetensors")
    before = torch.get_rng_state()
    run.teacher(TinyLM, weights=weights)(random_tokens())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("split", "held"), [(split_evenly, [2, 1, 2]), (split_in_order, [2, 2, 1])])
def test_layers_on_several_devices_give_the_same_outputs(run, split, held):
    plain = tiny_lm(blocks=5)
    frozen = FrozenModel(lambda: TinyLM(blocks=5), open_weights(save(plain, "one.safetensors")))
    layer = sum(p.nbytes for p in plain.blocks[0].parameters())
    rest = frozen.total_bytes() - 5 * layer
    budgets = [DeviceBudget(CPU, int(free)) for free in (rest + 2.5 * layer, 2.5 * layer, 2.5 * layer)]
    placed = place_on_devices(run._lifecycle.context, frozen, TeacherOptions(), split, "balanced", budgets)
    assert torch.equal(placed(random_tokens()), plain(random_tokens()))
    chosen = split([layer] * 5, rest, budgets)
    assert [chosen.count(device) for device in range(3)] == held


def test_an_even_split_differs_by_less_than_a_block():
    for count in range(1, 6):
        budgets = [DeviceBudget(CPU, 0)] * count
        chosen = split_evenly([10] * 24, 13, budgets)
        used = [10 * chosen.count(device) + (13 if device == 0 else 0) for device in range(count)]
        assert max(used) - min(used) <= 13
        assert chosen == sorted(chosen)


def test_a_teacher_that_fits_no_device_is_rejected(run):
    frozen = FrozenModel(TinyLM, open_weights(save(tiny_lm(), "one.safetensors")))
    context, budgets = run._lifecycle.context, [DeviceBudget(CPU, 1024)] * 2
    for split, name in ((split_evenly, "balanced"), (split_in_order, "sequential")):
        with pytest.raises(
            TeacherError, match=f"placement='{name}' would put .* on cpu, where 1.0 KiB are free for it"
        ):
            place_on_devices(context, frozen, TeacherOptions(), split, name, budgets)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": "cpu", "block.1": "cpu"}, r"device_map names 'block.1', which is not a module .* like \['blocks.1'"),
        ({"embed": "cpu", "blocks": "cpu"}, r"has no device for 2 module\(s\): \['', 'head'\]; add them"),
        ({"": "cpu", 1: "cpu"}, r"device_map names 1, which is not a module of the teacher: its names are like"),
        ({"": "cuda:7"}, r"device_map puts '' on 'cuda:7', but the devices here are \[.*'cpu'\]"),
        ({}, "placement='custom' needs device_map="),
    ],
)
def test_a_wrong_device_map_is_rejected_with_valid_names(run, device_map, message):
    with pytest.raises(TeacherError, match=message):
        run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="custom", device_map=device_map)


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("cuda", "'gpu'"),
        ("cuda:1", "'gpu'"),
        ("automatic", "'auto'"),
        ("ram", "'cpu'"),
        ("nvme", "'disk'"),
        ("FSDP", "'sharded'"),
    ],
)
def test_an_unknown_placement_is_rejected_with_the_closest_one(run, typed, right):
    with pytest.raises(
        TeacherError,
        match=f"placement='{typed}' does not exist: use placement={right}.* placements are auto, gpu, cpu",
    ):
        run.teacher(TinyLM, weights="nowhere", placement=typed)
    with pytest.raises(TeacherError, match=f"device_map='{typed}' is a string: use placement={right}"):
        run.teacher(TinyLM, weights="nowhere", device_map=typed)


def test_an_unknown_placement_lists_all_and_a_device_map_needs_custom(run):
    with pytest.raises(TeacherError, match="placement='moon' does not exist: the placements are auto, gpu, cpu"):
        run.teacher(TinyLM, weights="nowhere", placement="moon")
    with pytest.raises(TeacherError, match="placement='cpu' does not take a device_map: use placement='custom'"):
        run.teacher(TinyLM, weights="nowhere", placement="cpu", device_map={"": "cpu"})


def test_an_integer_dtype_is_rejected(run):
    with pytest.raises(TeacherError, match=r"dtype=torch.int8 is not a floating-point dtype: pass torch.bfloat16"):
        run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), dtype=torch.int8)


def normed():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 2)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # torch deprecates it, but many models use it
@pytest.mark.parametrize("placement", ["cpu", "offload", "sharded"])
def test_normalized_weights_are_computed_before_each_call(run, placement, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it for a norm on meta
    with torch.random.fork_rng():
        plain = normed().eval()
    teacher = run.teacher(normed, weights=save(plain, "one.safetensors"), placement=placement)
    inputs = torch.ones(2, 3)
    with torch.no_grad():
        assert torch.equal(teacher(inputs), plain(inputs))


class Student(nn.Module):
    def __init__(self, teacher):
        super().__init__()
        self.body, self.teacher = nn.Linear(2, 2), teacher


def test_a_model_with_a_teacher_attribute_contains_nothing_of_it(run):
    teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"))
    student = Student(teacher)
    assert list(student.state_dict()) == ["body.weight", "body.bias"]
    assert len(list(student.parameters())) == 2
    assert list(dict(student.named_modules())) == ["", "body"]
    assert student.to(torch.float64).teacher(random_tokens()).dtype == torch.float32
    assert copy.deepcopy(student).teacher is teacher
    with pytest.raises(TeacherError, match="cannot be pickled, also not as an attribute of a model"):
        torch.save(student, io.BytesIO())


def test_a_teacher_is_closed_when_its_run_ends(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="disk")
        teacher(random_tokens())
    with pytest.raises(TeacherError, match="this teacher is closed because its run has ended"):
        teacher(random_tokens())
    assert repr(teacher) == "Teacher(closed)"


def test_paths_can_start_with_a_tilde(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tiny_lm(), tmp_path / "one.safetensors")
    teacher = run.teacher(TinyLM, weights="~/one.safetensors", placement="cached", cache="~/outputs", inner="gpu")
    assert teacher.describe().startswith(f"cached: in {tmp_path / 'outputs'}, ")


def test_too_little_memory_is_reported_before_anything_is_loaded(run, monkeypatch):
    weights = save(tiny_lm(), "one.safetensors")
    monkeypatch.setattr("samestep.teacher.resident.free_host_memory", lambda: 1000)
    with pytest.raises(TeacherError, match=r"placement='gpu' needs .* on cpu for each of its 1 rank\(s\), and 1000 B"):
        run.teacher(TinyLM, weights=weights, placement="gpu")
    with pytest.raises(
        TeacherError, match=r"needs .* in the host memory of each node, and 1000 B are free: use placement='disk'"
    ):
        run.teacher(TinyLM, weights=weights, placement="cpu", dtype=torch.bfloat16)
    for placement in ("offload", "disk"):
        with pytest.raises(
            TeacherError, match=f"placement='{placement}' needs .* on cpu for two blocks and the weights outside"
        ):
            run.teacher(TinyLM, weights=weights, placement=placement)


@pytest.mark.parametrize("placement", LOCAL_PLACEMENTS)
def test_the_autocast_of_the_run_does_not_apply_to_a_teacher(run, placement):
    plain = tiny_lm()
    teacher = open_with(run, placement, save(plain, "one.safetensors"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
        found, pending = teacher(random_tokens()), teacher.submit(random_tokens()).result()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, plain(random_tokens()))
    assert torch.equal(pending, found)


class EmbeddingInput(TinyLM):
    """A TinyLM whose inputs are embeddings, as soft prompts are."""

    def forward(self, vectors):
        for block in self.blocks:
            vectors = block(self.dropout(vectors))
        return self.head(vectors)


@pytest.mark.parametrize("placement", ["gpu", "cpu", "balanced", "sequential", "custom"])
def test_gradients_pass_through_a_frozen_module_to_its_inputs(run, placement):
    plain = EmbeddingInput()
    plain.load_state_dict(tiny_lm().state_dict())
    plain.eval().requires_grad_(False)
    module = open_with(run, placement, save(tiny_lm(), "one.safetensors"), build=EmbeddingInput).module
    assert not module.training
    found = []
    for net in (plain, module):
        soft = torch.linspace(-1, 1, 2 * 6 * 16).reshape(2, 6, 16).requires_grad_()
        net(soft).square().sum().backward()
        found.append(soft.grad)
    assert found[0].abs().max() > 0
    assert torch.equal(*found)
    assert all(not p.requires_grad and p.grad is None for p in module.parameters())


@pytest.mark.parametrize("placement", ["offload", "disk", "sharded", "served", "cached"])
def test_placements_whose_weights_move_have_no_module(run, placement):
    teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement=placement)
    with pytest.raises(TeacherError, match=f"placement='{placement}' has no module .*: use placement='gpu', 'cpu', "):
        _ = teacher.module


def test_a_closed_teacher_has_no_module(run):
    teacher = run.teacher(TinyLM, weights=save(tiny_lm(), "one.safetensors"), placement="cpu")
    teacher.close()
    with pytest.raises(TeacherError, match="this teacher is closed"):
        _ = teacher.module


def test_a_module_on_another_device_moves_inputs_and_outputs(run):
    elsewhere = copy.copy(run._lifecycle.context)
    elsewhere.device = torch.device("meta")
    frozen = FrozenModel(TinyLM, open_weights(save(tiny_lm(), "one.safetensors")))
    placed = place_in_host_memory(elsewhere, frozen, TeacherOptions())
    seen = []
    placed.module.embed.register_forward_hook(lambda *given: seen.append(given[2]))
    assert placed.module(random_tokens()).is_meta
    assert placed(random_tokens()).is_meta
    assert torch.equal(seen[0], tiny_lm().embed(random_tokens()))
