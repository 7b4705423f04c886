"""Teachers from Hugging Face folders: bit-equal with from_pretrained, and clear errors for unusable folders."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import StepError, TeacherError
from samestep.nn import TopK, distill_loss, match_features, top_k
from tests.teachers import save, tiny_lm

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'samestep[teacher]'"
)

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 50}
TOKENS = torch.arange(12).view(2, 6)


def model(kind):
    if kind == "GPT2":  # ties its head
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=50, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    if kind == "Bert":
        return transformers.BertModel(transformers.BertConfig(**SMALL))
    extra = {"num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["Llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ["GPT2", "Bert", "Gemma"])]
)
def test_a_folder_gives_the_outputs_of_from_pretrained(run, tmp_path, kind, dtype):
    folder = tmp_path / "teacher"
    with torch.random.fork_rng():
        made = model(kind)
    made.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    plain = type(made).from_pretrained(folder, dtype=dtype).eval()
    for placement in ("gpu", "cpu", "offload", "disk", "balanced"):
        teacher = run.teacher(folder, placement=placement)
        for _ in range(2):
            found, there = teacher(input_ids=TOKENS), plain(input_ids=TOKENS)
            assert type(found) is type(there)
            assert torch.equal(found[0], there[0])
            assert found[0].dtype == dtype


def old_name(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rename"),
    [
        ("GPT2", lambda name: name.removeprefix("transformer.")),  # as in the file of the original GPT-2
        ("Bert", lambda name: f"bert.{old_name(name)}"),  # as in that of the original BERT, which has a head
    ],
)
def test_old_names_that_from_pretrained_accepts_are_accepted(run, tmp_path, kind, rename):
    folder = tmp_path / "teacher"
    with torch.random.fork_rng():
        made = model(kind)
    made.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    save_file({rename(name): value for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    assert not set(load_file(folder / "model.safetensors")) & set(state)
    plain = type(made).from_pretrained(folder).eval()
    assert torch.equal(plain(input_ids=TOKENS)[0], made.eval()(input_ids=TOKENS)[0])
    served = [("served", {"inner": "process"})] if kind == "Bert" else []  # its process imports transformers again
    for placement, more in (("disk", {}), ("balanced", {}), *served):
        teacher = run.teacher(folder, placement=placement, **more)
        assert torch.equal(teacher(input_ids=TOKENS)[0], plain(input_ids=TOKENS)[0])


def test_names_that_transformers_has_renamed_are_accepted(run, tmp_path):
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    with torch.random.fork_rng():
        made = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))
    made.save_pretrained(tmp_path / "teacher")  # under the original names
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    plain = type(made).from_pretrained(tmp_path / "teacher").eval().requires_grad_(False)
    for placement in ("cpu", "offload"):
        found = run.teacher(tmp_path / "teacher", placement=placement)(pixel_values=images)
        assert torch.equal(found.logits, plain(pixel_values=images).logits)


def test_merged_weights_must_be_saved_merged(run, tmp_path):
    more = {"num_key_value_heads": 2, "num_local_experts": 2}
    with torch.random.fork_rng():
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **more)).eval()
    made.save_pretrained(tmp_path / "teacher")
    split = set(load_file(tmp_path / "teacher/model.safetensors")) - set(made.state_dict())
    assert split, "transformers saves experts merged: the hint about merged weights can be removed"
    message = r"if transformers merges weights when it loads them, .* also pass weights='teacher.pt'"
    with pytest.raises(TeacherError, match=message):
        run.teacher(tmp_path / "teacher", placement="cpu")
    torch.save(made.state_dict(), tmp_path / "teacher.pt")
    teacher = run.teacher(tmp_path / "teacher", weights=tmp_path / "teacher.pt", placement="cpu")
    assert torch.equal(teacher(input_ids=TOKENS).logits, made.requires_grad_(False)(input_ids=TOKENS).logits)


@pytest.mark.slow
def test_a_head_that_the_architecture_lacks_is_unused_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.random.fork_rng():
        made = transformers.BertForPreTraining(transformers.BertConfig(**SMALL))
    made.save_pretrained(tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher/config.json").read_text())
    (tmp_path / "teacher/config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    plain = transformers.BertForMaskedLM.from_pretrained(tmp_path / "teacher").eval()
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        for more in ({"placement": "cpu"}, {"placement": "served", "inner": "process"}):
            assert torch.equal(
                run.teacher(tmp_path / "teacher", **more)(input_ids=TOKENS)[0], plain(input_ids=TOKENS)[0]
            )
    printed = capsys.readouterr().out
    assert "teacher: 4 name(s) in" in printed
    assert "are not in the module and stay unused, e.g. ['bert.pooler.dense.bias'" in printed


def test_layers_beyond_the_configuration_are_rejected(run, tmp_path):
    with torch.random.fork_rng():
        model("Llama").save_pretrained(tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher/config.json").read_text())
    (tmp_path / "teacher/config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(TeacherError, match=r"does not match .*: 9 name\(s\) in the file .*'model.layers.1."):
        run.teacher(tmp_path / "teacher", placement="cpu")


ALL_PLACEMENTS = (
    "gpu",
    "cpu",
    "balanced",
    "sequential",
    "custom",
    "offload",
    "disk",
    "sharded",
    "served",
    "cached",
    None,
)


def outputs_of_two_epochs(run, teacher, **more):
    """Yield inputs and outputs of two epochs with two micro-batches each."""
    for epoch in run.shard(TensorDataset(torch.arange(24).view(4, 6)), num_workers=0, micro_batch=2).epochs(2):
        for step in epoch:
            for (ids,) in step:
                yield ids, teacher(input_ids=ids, **more)


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_every_placement_keeps_the_output_class_of_the_model(run, tmp_path, kind, placement):
    with torch.random.fork_rng():
        made = model(kind)
    made.save_pretrained(tmp_path / "teacher")
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    teacher = run.teacher(tmp_path / "teacher", placement=placement, **options)
    with torch.no_grad():
        for ids, found in outputs_of_two_epochs(run, teacher, output_hidden_states=True):
            there = made.eval()(input_ids=ids, output_hidden_states=True, use_cache=False)
            assert type(found) is type(there)
            assert list(found) == list(there)
            assert torch.equal(found[0], there[0])
            assert torch.equal(found.to_tuple()[0], there[0])
            assert found[0] is (found.logits if kind == "Llama" else found.last_hidden_state)
            assert (found.loss if kind == "Llama" else found.cross_attentions) is None
            assert type(found.hidden_states) is tuple
            for ours, theirs in zip(found.hidden_states, there.hidden_states, strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_top_k_logits_keep_the_output_class_of_the_model(run, tmp_path, placement):
    with torch.random.fork_rng():
        made = model("Llama")
    made.save_pretrained(tmp_path / "teacher")
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    teacher = run.teacher(tmp_path / "teacher", placement=placement, top_k=3, **options)
    with torch.no_grad():
        for ids, found in outputs_of_two_epochs(run, teacher):
            there = made.eval()(input_ids=ids, use_cache=False)
            assert type(found) is type(there)
            assert isinstance(found.logits, TopK)
            assert torch.equal(found.logits.values, there.logits.topk(3).values)
            assert found.loss is None


def test_losses_reject_an_output_object_and_name_its_attribute():
    with torch.random.fork_rng():
        given = model("Llama")(input_ids=TOKENS)
    for student, teacher, whose in ((given, given.logits, "student"), (given.logits, given, "teacher")):
        message = f"distill_loss got a CausalLMOutputWithPast for the {whose}'s logits: pass its .logits"
        with pytest.raises(StepError, match=message):
            distill_loss(student, teacher)
    with pytest.raises(StepError, match=r"top_k got a CausalLMOutputWithPast for logits: pass its .logits"):
        top_k(given, 2)
    with torch.random.fork_rng():
        given = model("Bert")(input_ids=TOKENS)
    message = "match_features got a BaseModelOutput.* for the teacher's features: pass its .last_hidden_state"
    with pytest.raises(StepError, match=message):
        match_features(given.last_hidden_state, given)


def test_a_folder_without_config_or_architecture_is_rejected(run, tmp_path):
    folder = save(tiny_lm(), tmp_path / "teacher")
    with pytest.raises(TeacherError, match=r"build= is missing and .* has no config.json"):
        run.teacher(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"config.json does not name an architecture: add .architectures"):
        run.teacher(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["UnknownForCausalLM"]}))
    with pytest.raises(
        TeacherError, match=r"names the architecture 'UnknownForCausalLM', which transformers .* does not"
    ):
        run.teacher(folder)


@pytest.mark.parametrize("named", ["pipeline", "AutoConfig", "set_seed", "__name__"])
def test_a_folder_can_only_name_a_model_class_of_transformers(run, tmp_path, named):
    folder = save(tiny_lm(), tmp_path / "teacher")
    (folder / "config.json").write_text(json.dumps({"architectures": [named]}))
    with pytest.raises(TeacherError, match=f"names the architecture '{named}', which transformers .* does not"):
        run.teacher(folder)


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_an_invalid_configuration_is_rejected(run, tmp_path, text):
    folder = save(tiny_lm(), tmp_path / "teacher")
    (folder / "config.json").write_text(text)
    with pytest.raises(TeacherError, match=r"config.json is not a JSON object \(.*\): copy or download it again"):
        run.teacher(folder)


def test_code_in_a_folder_is_never_run(run, tmp_path, monkeypatch):
    folder = tmp_path / "teacher"
    model("Bert").save_pretrained(folder)
    (folder / "own.py").write_text("raise SystemExit('code of the folder was run')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))

    def prompt(*_):
        raise AssertionError("transformers asked on the terminal")

    monkeypatch.setattr("builtins.input", prompt)
    with pytest.raises(ValueError, match="trust_remote_code"):
        run.teacher(folder)


def test_a_folder_needs_transformers_and_names_the_extra(run, tmp_path, monkeypatch):
    folder = save(tiny_lm(), tmp_path / "teacher")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TeacherError, match="transformers is not installed: run pip install 'samestep"):
        run.teacher(folder)


def test_a_model_name_of_the_hub_is_rejected_with_the_download_command(run):
    message = r"run.teacher\('openai-community/gpt2'\): this folder does not exist, .* `hf download NAME "
    with pytest.raises(TeacherError, match=message):
        run.teacher("openai-community/gpt2", placement="cpu")
