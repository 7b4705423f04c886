"""FrozenModel teachers in one process: every placement gives the plain module's outputs, and mistakes are told."""

import copy
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samestep import Run
from samestep.cli.main import main
from samestep.errors import CommunicationError, TeacherError
from samestep.teacher.device_map import Seat, split_evenly, split_in_order, spread
from samestep.teacher.frozen_model import FrozenModel, blocks
from samestep.teacher.offload import place_offloaded, place_on_disk
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.single_device import place_in_host_memory
from samestep.teacher.weight_files import open_weights
from tests.teachers import Block, Speaker, save, speaker, words

CPU = torch.device("cpu")
HERE = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")
FORMS = ("one.safetensors", "one.pt", "shards")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


def ground_of(run):
    return Ground(run._comm, run.device, run.folder, run.print, run.once)


def teach(run, placement, weights, build=Speaker, **wish):
    if placement == "custom":
        wish["device_map"] = {"": "cpu", "blocks": "cpu", "blocks.1.mlp": "cpu"}
    return run.teacher(build, weights=weights, placement=placement, **wish)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", HERE)
def test_every_placement_gives_the_outputs_of_the_plain_module(run, placement, form):
    plain = speaker()
    teacher = teach(run, placement, save(plain, form, shards=3))
    for seed in range(3):
        assert torch.equal(teacher(words=words(seed=seed)), plain(words(seed=seed)))
    assert teacher.placement == placement
    assert teacher.describe().startswith(f"{placement}: ")


@pytest.mark.parametrize("placement", HERE)
def test_another_dtype_is_what_to_would_have_given(run, placement):
    plain = speaker().to(torch.bfloat16)
    for block in plain.blocks:
        block.frequencies = torch.arange(block.frequencies.numel()) / block.frequencies.numel()
    teacher = teach(run, placement, save(speaker(), "one.safetensors"), dtype=torch.bfloat16)
    for _ in range(2):
        found = teacher(words())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, plain(words()))


def test_a_run_that_is_not_started_has_no_teacher():
    with pytest.raises(CommunicationError, match="this run is not started: use `with Run"):
        Run(global_batch=4).teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="cpu")


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("module.", ", as DistributedDataParallel leaves them: save model.module.state_dict(), or"),
        ("_orig_mod.", ", as torch.compile leaves them: save model._orig_mod.state_dict(), or"),
        ("net.body.", "'net.body.': save model.net.body.state_dict(), or take it off once"),
    ],
)
def test_a_state_from_around_the_model_is_told_with_what_to_save_instead(run, prefix, who):
    state = {f"{prefix}{name}": tensor for name, tensor in speaker().state_dict().items()}
    torch.save({**state, "loss.weight": torch.ones(3)}, "around.pt")  # Lightning saves more than the model
    with pytest.raises(
        TeacherError, match=f"holds the weights of Speaker under names that begin with '{prefix}'"
    ) as no:
        run.teacher(Speaker, weights="around.pt", placement="cpu")
    assert who in str(no.value)
    # what it says to type is Python
    torch.save({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}, "inside.pt")
    assert f"{{name.removeprefix('{prefix}'): tensor for name, tensor in state.items()" in str(no.value)
    assert torch.equal(run.teacher(Speaker, weights="inside.pt", placement="cpu")(words()), speaker()(words()))


def test_weights_of_a_part_of_the_module_are_told_with_the_part(run):
    weights = save(speaker(), "one.safetensors")
    with pytest.raises(
        TeacherError, match=r"weights of a part of Sequential, .* '0.' there: let build\(\) return .*\.0$"
    ):
        run.teacher(lambda: nn.Sequential(Speaker()), weights=weights, placement="cpu")


def test_a_checkpoint_of_a_run_is_told_with_the_command_that_exports_it(run, tmp_path):
    with torch.random.fork_rng():
        checkpoint = run.checkpoint("a run", model=run.wrap(speaker()))
    checkpoint.save()
    run.barrier()
    checkpoint.wait()
    [place] = Path("a run").glob("step-*")
    for given, named in (("a run", "a run"), (place, place), (next(place.glob("rank-*.safetensors")), place)):
        command = f"samestep checkpoint export '{tmp_path / named}' --to teacher.safetensors"
        with pytest.raises(TeacherError, match=f"is a checkpoint of samestep, .* type `{command}` and give that file"):
            run.teacher(Speaker, weights=given, placement="cpu")
    assert main(["checkpoint", "export", "a run", "--to", str(place / "model.safetensors")]) == 0
    assert torch.equal(run.teacher(Speaker, weights=place, placement="cpu")(words()), speaker()(words()))


@pytest.mark.parametrize("placement", ["gpu", "served"])
def test_inputs_of_another_dtype_than_the_weights_are_told_where_a_call_fails(run, placement):
    save_file(nn.Linear(3, 2).state_dict(), "one.safetensors")
    teacher = run.teacher(lambda: nn.Linear(3, 2), weights="one.safetensors", placement=placement, dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, TeacherError), match="dtype") as no:
        teacher(torch.ones(4, 3))
    assert no.value.__notes__ == [
        "the teacher's weights are torch.bfloat16 and its inputs here torch.float32: give inputs with "
        ".to(torch.bfloat16), or run.teacher(..., dtype=torch.float32)"
    ]
    assert teacher(torch.ones(4, 3).to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, TeacherError)) as no:
        teacher(torch.ones(4, 7).to(torch.bfloat16))
    assert not getattr(no.value, "__notes__", [])


def test_outputs_need_no_gradient_and_may_still_teach(run):
    teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"))
    found = teacher(words())
    assert not found.requires_grad
    student = nn.Linear(31, 31)
    (student(found) * found).sum().backward()  # what is kept for backward may be the teacher's
    assert student.weight.grad is not None


def test_the_runs_own_luck_is_not_touched(run):
    weights = save(speaker(), "one.safetensors")
    before = torch.get_rng_state()
    run.teacher(Speaker, weights=weights)(words())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("split", "held"), [(split_evenly, [2, 1, 2]), (split_in_order, [2, 2, 1])])
def test_layers_spread_over_several_devices_give_the_same_outputs(run, split, held):
    plain = speaker(blocks=5)
    frozen = FrozenModel(lambda: Speaker(blocks=5), open_weights(save(plain, "one.safetensors")))
    layer = sum(p.nbytes for p in plain.blocks[0].parameters())
    rest = frozen.bytes - 5 * layer
    seats = [Seat(CPU, int(room)) for room in (rest + 2.5 * layer, 2.5 * layer, 2.5 * layer)]
    placed = spread(ground_of(run), frozen, TeacherOptions(), seats, split, "balanced")
    assert torch.equal(placed(words()), plain(words()))
    chosen = split([layer] * 5, rest, seats)
    assert [chosen.count(seat) for seat in range(3)] == held


def test_even_shares_differ_by_less_than_a_block():
    for count in range(1, 6):
        seats = [Seat(CPU, 0)] * count
        chosen = split_evenly([10] * 24, 13, seats)
        used = [sum(10 for seat in chosen if seat == at) + (13 if at == 0 else 0) for at in range(count)]
        assert max(used) - min(used) <= 13
        assert chosen == sorted(chosen)


def test_a_teacher_that_fits_no_device_is_refused(run):
    frozen = FrozenModel(Speaker, open_weights(save(speaker(), "one.safetensors")))
    for split, name in ((split_evenly, "balanced"), (split_in_order, "sequential")):
        with pytest.raises(
            TeacherError, match=f"placement='{name}' would put .* on cpu, where 1.0 KiB are free for it"
        ):
            spread(ground_of(run), frozen, TeacherOptions(), [Seat(CPU, 1024)] * 2, split, name)


@pytest.mark.parametrize(
    ("device_map", "told"),
    [
        ({"": "cpu", "block.1": "cpu"}, r"device_map names 'block.1', which is no module .* like \['blocks.1'"),
        ({"embed": "cpu", "blocks": "cpu"}, r"gives no device to 2 module\(s\): \['', 'head'\]; add them"),
        ({"": "cpu", 1: "cpu"}, r"device_map names 1, which is no module of the teacher: its names are like"),
        ({"": "cuda:7"}, r"device_map puts '' on 'cuda:7': the devices here are \[.*'cpu'\]"),
        ({}, "placement='custom' needs device_map="),
    ],
)
def test_a_wrong_device_map_is_told_with_the_right_names(run, device_map, told):
    with pytest.raises(TeacherError, match=told):
        run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="custom", device_map=device_map)


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
def test_a_wrong_word_gets_the_right_one(run, typed, right):
    with pytest.raises(
        TeacherError, match=f"placement='{typed}' is no placement: say placement={right}.* there are auto, gpu, cpu"
    ):
        run.teacher(Speaker, weights="nowhere", placement=typed)
    with pytest.raises(TeacherError, match=f"device_map='{typed}' is one word: say placement={right}"):
        run.teacher(Speaker, weights="nowhere", device_map=typed)


def test_an_unknown_word_lists_all_and_a_map_needs_custom(run):
    with pytest.raises(TeacherError, match="placement='moon' is no placement: there are auto, gpu, cpu, balanced"):
        run.teacher(Speaker, weights="nowhere", placement="moon")
    with pytest.raises(TeacherError, match="placement='cpu' takes no device_map: use placement='custom'"):
        run.teacher(Speaker, weights="nowhere", placement="cpu", device_map={"": "cpu"})


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def overwrite(path):
    path.write_bytes(b"\xff" * 1000)


@pytest.mark.parametrize(
    ("form", "harm", "told"),
    [
        ("one.safetensors", cut, "is no whole file of safetensors .*copy or download it anew"),
        ("one.safetensors", overwrite, "is no whole file of safetensors"),
        ("one.safetensors", lambda path: path.write_bytes(b""), "is empty: copy or download it anew"),
        (
            "one.safetensors",
            lambda path: path.unlink(),
            "no such file or folder here, and nothing is downloaded; give a ",
        ),
        ("one.pt", cut, "cannot be read as a file of tensors"),
        (
            "one.pt",
            lambda path: path.write_text("hello"),
            r"cannot be read as a file of tensors \(KeyError: 101\): it was",
        ),
        ("one.pt", lambda path: torch.save([1, 2], path), "holds list and no plain mapping of names to tensors"),
        (
            "one.pt",
            lambda path: torch.save(nn.Linear(1, 1), path),
            r"more than tensors, a torch\S+Linear among it, .*write",
        ),
        ("shards", lambda path: next(path.glob("*2-of*")).unlink(), "lacks 1 of 3 shards that .* lists: .*2-of"),
        ("shards", lambda path: cut(next(path.glob("*2-of*"))), "is no whole file of safetensors"),
        ("shards", lambda path: next(path.glob("*.json")).write_text("{"), "is no index of shards"),
        ("shards", lambda path: shutil.rmtree(path) or path.mkdir(), r"holds nothing: give a .safetensors"),
    ],
)
def test_a_harmed_file_is_named_with_what_to_do(run, form, harm, told):
    path = save(speaker(), form, shards=3)
    harm(path)
    with pytest.raises(TeacherError, match=told):
        run.teacher(Speaker, weights=path)


def test_a_file_in_the_old_format_of_torch_is_read(run, tmp_path):
    torch.save(speaker().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(run.teacher(Speaker, weights=tmp_path / "old.pt")(words()), speaker()(words()))


def test_a_state_is_no_path_and_is_not_printed(run):
    with pytest.raises(TeacherError, match=r"^weights= got a OrderedDict: give the path of a .safetensors file"):
        run.teacher(Speaker, weights=speaker().state_dict())
    with pytest.raises(TeacherError, match=r"^weights= is empty: give the path of a .safetensors file"):
        run.teacher(Speaker, weights="")


def test_shards_without_an_index_are_joined_and_must_not_overlap(run):
    path = save(speaker(), "shards", shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert torch.equal(run.teacher(Speaker, weights=path)(words()), speaker()(words()))
    shutil.copy(path / "model-00001-of-00003.safetensors", path / "copy.safetensors")
    with pytest.raises(TeacherError, match=r"both hold .*: they are not shards of one model"):
        run.teacher(Speaker, weights=path)


def test_an_index_of_another_model_is_refused(run):
    path = save(speaker(), "shards", shards=2)
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**listed, "blocks.9.out.bias": listed["places"]}}))
    with pytest.raises(TeacherError, match=r"says that .* holds 'blocks.9.out.bias', and it does not"):
        run.teacher(Speaker, weights=path)


def test_a_state_inside_a_training_file_is_found(run):
    torch.save({"state_dict": speaker().state_dict(), "epoch": 3}, "trained.pt")
    assert torch.equal(run.teacher(Speaker, weights="trained.pt")(words()), speaker()(words()))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            lambda: Speaker(blocks=4),
            r"are not of one model: 11 name\(s\) of the module are not in the file, e.g. \['blocks.3",
        ),
        (
            lambda: Speaker(blocks=2),
            r"are not of one model: 11 name\(s\) of the file are not in the module, e.g. \['blocks.2",
        ),
        (lambda: Speaker(width=32), "have another shape in .*: places is .6, 32. and there .6, 16."),
        (lambda: 3, "build.. gave a int and no torch.nn.Module"),
        (Speaker(), "build=Speaker.*is a module and already takes memory on every rank: pass the function"),
        (3, "build=3 is no function"),
    ],
)
def test_a_module_that_is_not_the_files_is_told_name_by_name(run, build, told):
    weights = save(speaker(), "one.safetensors")
    with pytest.raises(TeacherError, match=told):
        run.teacher(build, weights=weights)


def test_a_dtype_without_fractions_is_refused(run):
    with pytest.raises(TeacherError, match=r"dtype=torch.int8 holds no fractions: use torch.bfloat16"):
        run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), dtype=torch.int8)


def test_weights_are_asked_for(run):
    with pytest.raises(TeacherError, match=r"a teacher needs weights=: a .safetensors file"):
        run.teacher(Speaker)


class Untied(Speaker):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 31, bias=False)


def test_a_tie_that_the_file_does_not_have_is_refused(run):
    with torch.random.fork_rng():
        weights = save(Untied(), "one.safetensors")
    with pytest.raises(
        TeacherError, match=r"build.. ties .*embed.weight.* and .*head.weight.* to one tensor and .* two"
    ):
        run.teacher(Speaker, weights=weights)


class Curious(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.largest = self.weight.max().item()


class OnMeta(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("steps", torch.arange(3, device="meta"), persistent=False)


class AttributeOnMeta(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.steps = torch.arange(3, device="meta")


class Moved(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self._parameters["weight"] = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (Curious, "build.. looks at the values of parameters, which have none yet"),
        (OnMeta, "made 'steps' on the meta device and no file holds it"),
        (AttributeOnMeta, "made 'steps' on the meta device and no file holds it"),
        (Moved, "build.. left 'weight' on cpu: a teacher's weights come from weights="),
        (
            lambda: nn.LazyLinear(3),
            "makes a LazyLinear, whose 'weight' has no shape before the first call: give it its",
        ),
    ],
)
def test_a_build_that_cannot_go_without_memory_is_told_why(run, build, told):
    weights = save(nn.Linear(3, 3), "one.safetensors")
    with pytest.raises(TeacherError, match=told):
        run.teacher(build, weights=weights)


def normed():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 2)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # torch's: it is old, and in many a model
@pytest.mark.parametrize("placement", ["cpu", "offload", "sharded"])
def test_weights_that_are_normed_before_each_call_are_computed_there(run, placement, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when a norm is taken without values
    with torch.random.fork_rng():
        plain = normed().eval()
    teacher = run.teacher(normed, weights=save(plain, "one.safetensors"), placement=placement)
    inputs = torch.ones(2, 3)
    with torch.no_grad():
        assert torch.equal(teacher(inputs), plain(inputs))


def test_a_build_that_fails_by_itself_is_not_dressed_up(run):
    def build():
        raise NotImplementedError("not today")

    with pytest.raises(NotImplementedError, match="not today"):
        run.teacher(build, weights=save(nn.Linear(3, 3), "one.safetensors"))


def test_building_takes_no_memory_for_parameters():
    seen = []

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            seen.extend(p.device.type for p in self.parameters())

    with torch.random.fork_rng():
        weights = save(Large(), "one.safetensors")
    seen.clear()
    frozen = FrozenModel(Large, open_weights(weights))
    assert seen == ["meta"] * 6
    assert all(p.is_meta for p in frozen.skeleton().parameters())


def test_files_are_mapped_and_not_copied(run):
    weights = open_weights(save(speaker(), "one.safetensors"))
    assert weights.tensor("places").data_ptr() == weights.tensor("places").data_ptr()
    span = weights.span("places")
    raw = span.path.read_bytes()[span.start : span.start + span.length]
    assert raw == weights.tensor("places").numpy().tobytes()
    held = weights.tensor("places")
    weights.release()
    assert held.sum() == weights.tensor("places").sum()


def test_blocks_are_the_layers_that_repeat():
    assert list(blocks(speaker())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]
    pair = nn.ModuleDict({"left": nn.ModuleList([Block(), Block()]), "right": nn.Linear(2, 2)})
    assert list(blocks(pair)) == ["left.0", "left.1", "right"]
    assert list(blocks(nn.Linear(2, 2))) == [""]
    same = Block()
    assert list(blocks(nn.ModuleList([same, same, Block()]))) == ["0", "2"]
    assert list(blocks(nn.TransformerEncoderLayer(8, 2))) == ["self_attn", "linear1", "linear2", "norm1", "norm2"]


class Wild(nn.Module):
    """Calls its blocks out of order, twice, and one inside another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        for at in (3, 3, 0, 4, 1, 2, 0):
            x = self.blocks[at](x)
        return x


@pytest.mark.parametrize("placement", ["offload", "disk"])
def test_streamed_blocks_may_be_called_in_any_order(run, placement):
    with torch.random.fork_rng():
        plain = Wild().eval()
    teacher = run.teacher(Wild, weights=save(plain, "one.safetensors"), placement=placement)
    for value in range(3):
        assert torch.equal(teacher(torch.full((2, 4), float(value))), plain(torch.full((2, 4), float(value))))


class Sneaky(nn.Module):
    """Takes the weights of a block without calling it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return nn.functional.linear(self.blocks[0](x), self.blocks[1].weight)


class Nested(nn.Module):
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
    ("build", "told"),
    [
        (Sneaky, "uses 'weight' of a layer in 'blocks.1' without calling 'blocks.1', and it streams in when it is"),
        (Nested, "'blocks.2' is called inside 'blocks.0', and both would stream through the same memory"),
    ],
)
def test_weights_that_are_not_there_are_never_computed_with(run, placement, build, told):
    with torch.random.fork_rng():
        weights = save(build(), "one.safetensors")
    teacher = run.teacher(build, weights=weights, placement=placement)
    with pytest.raises(TeacherError, match=told):
        teacher(torch.ones(2, 4))


def test_the_error_of_a_streamed_forward_passes_as_it_is(run):
    teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="offload")
    teacher(words())
    with pytest.raises(RuntimeError, match="must match the size"):
        teacher(words()[:, :3])
    assert torch.equal(teacher(words()), speaker()(words()))


def test_streaming_holds_two_blocks_on_the_device(run):
    plain = speaker(blocks=6)
    frozen = FrozenModel(lambda: Speaker(blocks=6), open_weights(save(plain, "one.safetensors")))
    layer = sum(p.nbytes for p in plain.blocks[0].parameters())
    for place in (place_offloaded, place_on_disk):
        placed = place(ground_of(run), frozen, TeacherOptions())
        placed(words())
        held = {slot.memory.data_ptr(): slot.memory.nbytes for slot in (block.slot for block in placed._blocks)}
        assert len(held) == 2
        assert sum(held.values()) < 2.1 * layer
        placed.close()


def test_the_next_block_is_on_its_way_while_one_computes(run):
    frozen = FrozenModel(Speaker, open_weights(save(speaker(), "one.safetensors")))
    placed = place_on_disk(ground_of(run), frozen, TeacherOptions())
    seen = []
    placed._module.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(placed._blocks[1].slot.holder))
    placed(words())
    placed.close()
    assert seen == [1]


def test_a_file_that_shrinks_while_it_is_read_is_told(run):
    path = save(speaker(blocks=6), "one.safetensors")
    teacher = run.teacher(lambda: Speaker(blocks=6), weights=path, placement="disk")
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
    for _ in range(2):
        with pytest.raises(TeacherError, match=r"ended .* bytes too early: it has changed since the teacher was made"):
            teacher(words())


class Student(nn.Module):
    def __init__(self, teacher):
        super().__init__()
        self.body, self.teacher = nn.Linear(2, 2), teacher


def test_a_model_that_holds_the_teacher_has_nothing_of_it(run):
    teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"))
    student = Student(teacher)
    assert list(student.state_dict()) == ["body.weight", "body.bias"]
    assert len(list(student.parameters())) == 2
    assert list(dict(student.named_modules())) == ["", "body"]
    assert student.to(torch.float64).teacher(words()).dtype == torch.float32
    assert copy.deepcopy(student).teacher is teacher
    with pytest.raises(TeacherError, match="cannot be pickled, nor saved with the model whose attribute it is"):
        torch.save(student, io.BytesIO())


def test_a_teacher_ends_with_its_run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="disk")
        teacher(words())
    with pytest.raises(TeacherError, match="this teacher is closed, since its run has ended"):
        teacher(words())
    assert repr(teacher) == "Teacher(closed)"


def test_paths_may_begin_with_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(speaker(), tmp_path / "one.safetensors")
    teacher = run.teacher(Speaker, weights="~/one.safetensors", placement="cached", cache="~/outputs", inner="gpu")
    assert teacher.describe().startswith(f"cached: in {tmp_path / 'outputs'}, ")


def test_too_little_memory_is_told_before_anything_is_read(run, monkeypatch):
    weights = save(speaker(), "one.safetensors")
    monkeypatch.setattr("samestep.teacher.single_device.host_room", lambda: 1000)
    monkeypatch.setattr("samestep.teacher.single_device.host_room", lambda: 1000)
    with pytest.raises(TeacherError, match=r"placement='gpu' needs .* on cpu for each of 1 rank\(s\) there and 1000 B"):
        run.teacher(Speaker, weights=weights, placement="gpu")
    with pytest.raises(
        TeacherError, match=r"takes .* in the memory of each node and 1000 B are free: use placement='disk'"
    ):
        run.teacher(Speaker, weights=weights, placement="cpu", dtype=torch.bfloat16)
    for placement in ("offload", "disk"):
        with pytest.raises(
            TeacherError, match=f"placement='{placement}' needs .* on cpu for two blocks and what is no"
        ):
            run.teacher(Speaker, weights=weights, placement=placement)


@pytest.mark.parametrize("placement", HERE)
def test_the_runs_autocast_does_not_reach_a_teacher(run, placement):
    plain = speaker()
    teacher = teach(run, placement, save(plain, "one.safetensors"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
        found, pending = teacher(words()), teacher.ahead(words()).result()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, plain(words()))
    assert torch.equal(pending, found)


class Reader(Speaker):
    """A Speaker that starts from vectors, as soft prompts do."""

    def forward(self, vectors):
        for block in self.blocks:
            vectors = block(self.dropout(vectors))
        return self.head(vectors)


@pytest.mark.parametrize("placement", ["gpu", "cpu", "balanced", "sequential", "custom"])
def test_gradients_pass_through_a_frozen_module_to_its_inputs(run, placement):
    plain = Reader()
    plain.load_state_dict(speaker().state_dict())
    plain.eval().requires_grad_(False)
    module = teach(run, placement, save(speaker(), "one.safetensors"), build=Reader).module
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
def test_placements_whose_weights_do_not_stay_have_no_module(run, placement):
    teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement=placement)
    with pytest.raises(TeacherError, match=f"placement='{placement}' has no module .* use placement='gpu', 'cpu', "):
        _ = teacher.module


def test_a_closed_teacher_has_no_module(run):
    teacher = run.teacher(Speaker, weights=save(speaker(), "one.safetensors"), placement="cpu")
    teacher.close()
    with pytest.raises(TeacherError, match="this teacher is closed"):
        _ = teacher.module


def test_a_module_elsewhere_brings_inputs_to_it_and_outputs_home(run):
    away = Ground(run._comm, torch.device("meta"), run.folder, run.print, run.once)
    frozen = FrozenModel(Speaker, open_weights(save(speaker(), "one.safetensors")))
    placed = place_in_host_memory(away, frozen, TeacherOptions())
    seen = []
    placed.module.embed.register_forward_hook(lambda *given: seen.append(given[2]))
    assert placed.module(words()).is_meta
    assert placed(words()).is_meta
    assert torch.equal(seen[0], speaker().embed(words()))
