"""Weights in files and the modules they belong to: mismatches, corrupt files and build functions that fail."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.cli.main import main
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel, blocks
from samestep.teacher.model_files import open_weights
from tests.teachers import Block, TinyLM, random_tokens, save, tiny_lm


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path):
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("module.", ", as DistributedDataParallel saves them: save model.module.state_dict(), or"),
        ("_orig_mod.", ", as torch.compile saves them: save model._orig_mod.state_dict(), or"),
        ("net.body.", "'net.body.': save model.net.body.state_dict(), or remove the prefix once"),
    ],
)
def test_the_state_of_a_wrapped_model_is_rejected_with_what_to_save_instead(run, prefix, advice):
    state = {f"{prefix}{name}": tensor for name, tensor in tiny_lm().state_dict().items()}
    torch.save({**state, "loss.weight": torch.ones(3)}, "around.pt")  # Lightning saves more than the model
    with pytest.raises(
        TeacherError, match=f"holds the weights of TinyLM under names that begin with '{prefix}'"
    ) as caught:
        run.teacher(TinyLM, weights="around.pt", placement="cpu")
    assert advice in str(caught.value)
    # the code in the message works
    torch.save({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}, "inside.pt")
    assert f"{{name.removeprefix('{prefix}'): tensor for name, tensor in state.items()" in str(caught.value)
    assert torch.equal(
        run.teacher(TinyLM, weights="inside.pt", placement="cpu")(random_tokens()), tiny_lm()(random_tokens())
    )


def test_weights_of_a_submodule_are_rejected_with_its_name(run):
    weights = save(tiny_lm(), "one.safetensors")
    with pytest.raises(
        TeacherError, match=r"weights of a part of Sequential, .* '0.' in the module: let build\(\) return .*\.0$"
    ):
        run.teacher(lambda: nn.Sequential(TinyLM()), weights=weights, placement="cpu")


def test_a_checkpoint_is_rejected_with_the_command_that_exports_it(run, tmp_path):
    with torch.random.fork_rng():
        checkpoint = run.checkpoint("a run", model=run.wrap(tiny_lm()))
    checkpoint.save()
    run.barrier()
    checkpoint.wait()
    [step] = Path("a run").glob("step-*")
    for given, named in (("a run", "a run"), (step, step), (next(step.glob("rank-*.safetensors")), step)):
        command = f"samestep checkpoint export '{tmp_path / named}' --to teacher.safetensors"
        with pytest.raises(TeacherError, match=f"is a samestep checkpoint, .* run `{command}` and pass that file"):
            run.teacher(TinyLM, weights=given, placement="cpu")
    assert main(["checkpoint", "export", "a run", "--to", str(step / "model.safetensors")]) == 0
    assert torch.equal(run.teacher(TinyLM, weights=step, placement="cpu")(random_tokens()), tiny_lm()(random_tokens()))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def overwrite(path):
    path.write_bytes(b"\xff" * 1000)


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        ("one.safetensors", truncate, "is not a complete safetensors file .*copy or download it again"),
        ("one.safetensors", overwrite, "is not a complete safetensors file"),
        ("one.safetensors", lambda path: path.write_bytes(b""), "is empty: copy or download it again"),
        (
            "one.safetensors",
            lambda path: path.unlink(),
            "does not exist on this machine, and samestep downloads nothing: pass a ",
        ),
        ("one.pt", truncate, "cannot be read as a file of tensors"),
        (
            "one.pt",
            lambda path: path.write_text("hello"),
            r"cannot be read as a file of tensors \(KeyError: 101\): it was",
        ),
        ("one.pt", lambda path: torch.save([1, 2], path), "holds list instead of a mapping of names to tensors"),
        (
            "one.pt",
            lambda path: torch.save(nn.Linear(1, 1), path),
            r"more than tensors, for example a torch\S+Linear, .*write",
        ),
        ("shards", lambda path: next(path.glob("*2-of*")).unlink(), "lacks 1 of the 3 shards in .*: .*2-of"),
        ("shards", lambda path: truncate(next(path.glob("*2-of*"))), "is not a complete safetensors file"),
        ("shards", lambda path: next(path.glob("*.json")).write_text("{"), "is not a valid index of shards"),
        ("shards", lambda path: shutil.rmtree(path) or path.mkdir(), r"is empty: pass a .safetensors"),
    ],
)
def test_a_corrupt_file_is_named_with_the_remedy(run, form, damage, message):
    path = save(tiny_lm(), form, shards=3)
    damage(path)
    with pytest.raises(TeacherError, match=message):
        run.teacher(TinyLM, weights=path)


def test_a_file_in_the_old_format_of_torch_can_be_read(run, tmp_path):
    torch.save(tiny_lm().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(run.teacher(TinyLM, weights=tmp_path / "old.pt")(random_tokens()), tiny_lm()(random_tokens()))


def test_weights_must_be_a_path_and_a_state_dict_is_not_printed(run):
    with pytest.raises(TeacherError, match=r"^weights= got a OrderedDict: pass the path of a .safetensors file"):
        run.teacher(TinyLM, weights=tiny_lm().state_dict())
    with pytest.raises(TeacherError, match=r"^weights= is empty: pass the path of a .safetensors file"):
        run.teacher(TinyLM, weights="")


def test_shards_without_an_index_are_joined_and_must_not_overlap(run):
    path = save(tiny_lm(), "shards", shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert torch.equal(run.teacher(TinyLM, weights=path)(random_tokens()), tiny_lm()(random_tokens()))
    shutil.copy(path / "model-00001-of-00003.safetensors", path / "copy.safetensors")
    with pytest.raises(TeacherError, match=r"both hold .*, so they are not shards of one model"):
        run.teacher(TinyLM, weights=path)


def test_an_index_of_another_model_is_rejected(run):
    path = save(tiny_lm(), "shards", shards=2)
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**listed, "blocks.9.out.bias": listed["positions"]}}))
    with pytest.raises(TeacherError, match=r"lists 'blocks.9.out.bias' in .*, which does not hold it"):
        run.teacher(TinyLM, weights=path)


def test_a_state_dict_inside_a_training_file_is_found(run):
    torch.save({"state_dict": tiny_lm().state_dict(), "epoch": 3}, "trained.pt")
    assert torch.equal(run.teacher(TinyLM, weights="trained.pt")(random_tokens()), tiny_lm()(random_tokens()))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: TinyLM(blocks=4),
            r"does not match the weights in .*: 11 name\(s\) of the module are not in the file, e.g. \['blocks.3",
        ),
        (
            lambda: TinyLM(blocks=2),
            r"does not match the weights in .*: 11 name\(s\) in the file are not in the module, e.g. \['blocks.2",
        ),
        (lambda: TinyLM(width=32), "have another shape in .*: positions is .6, 32., in the file .6, 16."),
        (lambda: 3, "build.. returned a int instead of a torch.nn.Module"),
        (TinyLM(), "build=TinyLM.*is a module and already takes memory on every rank: pass the function"),
        (3, "build=3 is not a function"),
    ],
)
def test_a_module_that_does_not_match_the_file_is_rejected_with_names(run, build, message):
    weights = save(tiny_lm(), "one.safetensors")
    with pytest.raises(TeacherError, match=message):
        run.teacher(build, weights=weights)


def test_weights_are_required(run):
    with pytest.raises(TeacherError, match=r"run.teacher needs weights=: pass a .safetensors file"):
        run.teacher(TinyLM)


class Untied(TinyLM):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 31, bias=False)


def test_tied_weights_that_differ_in_the_file_are_rejected(run):
    with torch.random.fork_rng():
        weights = save(Untied(), "one.safetensors")
    with pytest.raises(
        TeacherError, match=r"build.. ties .*embed.weight.* and .*head.weight.* to one tensor, but .* two"
    ):
        run.teacher(TinyLM, weights=weights)


class ReadsItsWeights(nn.Linear):
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
    ("build", "message"),
    [
        (ReadsItsWeights, "build.. reads the values of parameters, which are not loaded yet"),
        (OnMeta, "created 'steps' on the meta device and no file holds its"),
        (AttributeOnMeta, "created 'steps' on the meta device and no file holds its"),
        (Moved, "build.. left 'weight' on cpu: a teacher's weights come from weights="),
        (
            lambda: nn.LazyLinear(3),
            "makes a LazyLinear whose 'weight' has no shape before the first call: give it its",
        ),
    ],
)
def test_a_build_that_needs_the_values_of_parameters_is_rejected(run, build, message):
    weights = save(nn.Linear(3, 3), "one.safetensors")
    with pytest.raises(TeacherError, match=message):
        run.teacher(build, weights=weights)


def test_an_error_in_build_is_raised_unchanged(run):
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
    weights = open_weights(save(tiny_lm(), "one.safetensors"))
    assert weights.tensor("positions").data_ptr() == weights.tensor("positions").data_ptr()
    stored = weights.byte_range("positions")
    raw = stored.path.read_bytes()[stored.start : stored.start + stored.length]
    assert raw == weights.tensor("positions").numpy().tobytes()
    held = weights.tensor("positions")
    weights.release()
    assert held.sum() == weights.tensor("positions").sum()


def test_blocks_are_the_repeated_layers():
    assert list(blocks(tiny_lm())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]
    pair = nn.ModuleDict({"left": nn.ModuleList([Block(), Block()]), "right": nn.Linear(2, 2)})
    assert list(blocks(pair)) == ["left.0", "left.1", "right"]
    assert list(blocks(nn.Linear(2, 2))) == [""]
    same = Block()
    assert list(blocks(nn.ModuleList([same, same, Block()]))) == ["0", "2"]
    assert list(blocks(nn.TransformerEncoderLayer(8, 2))) == ["self_attn", "linear1", "linear2", "norm1", "norm2"]
