"""Teachers from Hugging Face folders: bit-equal with transformers' own loading, and told where they cannot be built."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import StepError, TeacherError
from samestep.nn import TopK, distill_loss, match_features, top_k
from tests.teachers import save, speaker

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'samestep[teacher]'"
)

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 50}
WORDS = torch.arange(12).view(2, 6)


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
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it, for good
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        yield run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["GPT2", "Bert", "Llama", "Gemma"])
def test_a_folder_gives_what_from_pretrained_gives(run, tmp_path, kind, dtype):
    folder = tmp_path / "teacher"
    with torch.random.fork_rng():
        made = model(kind)
    made.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    plain = type(made).from_pretrained(folder, dtype=dtype).eval()
    for placement in ("gpu", "cpu", "offload", "disk", "balanced"):
        teacher = run.teacher(folder, placement=placement)
        for _ in range(2):
            found, there = teacher(input_ids=WORDS), plain(input_ids=WORDS)
            assert type(found) is type(there)
            assert torch.equal(found[0], there[0])
            assert found[0].dtype == dtype


def as_old_files_say(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rename"),
    [
        ("GPT2", lambda name: name.removeprefix("transformer.")),  # as the file of the first GPT-2 is
        ("Bert", lambda name: f"bert.{as_old_files_say(name)}"),  # as that of the first BERT, whose file has a head
    ],
)
def test_names_that_from_pretrained_understands_are_understood(run, tmp_path, kind, rename):
    folder = tmp_path / "teacher"
    with torch.random.fork_rng():
        made = model(kind)
    made.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    save_file({rename(name): value for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    assert not set(load_file(folder / "model.safetensors")) & set(state)
    plain = type(made).from_pretrained(folder).eval()
    assert torch.equal(plain(input_ids=WORDS)[0], made.eval()(input_ids=WORDS)[0])
    for placement, more in (("disk", {}), ("balanced", {}), ("served", {"inner": "process"})):
        teacher = run.teacher(folder, placement=placement, **more)
        assert torch.equal(teacher(input_ids=WORDS)[0], plain(input_ids=WORDS)[0])


def test_names_that_transformers_has_changed_since_are_understood(run, tmp_path):
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    with torch.random.fork_rng():
        made = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))
    made.save_pretrained(tmp_path / "teacher")  # under the names of the first version
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    plain = type(made).from_pretrained(tmp_path / "teacher").eval().requires_grad_(False)
    for placement in ("cpu", "offload"):
        found = run.teacher(tmp_path / "teacher", placement=placement)(pixel_values=images)
        assert torch.equal(found.logits, plain(pixel_values=images).logits)


def test_weights_that_transformers_joins_are_taken_as_joined(run, tmp_path):
    more = {"num_key_value_heads": 2, "num_local_experts": 2}
    with torch.random.fork_rng():
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **more)).eval()
    made.save_pretrained(tmp_path / "teacher")
    apart = set(load_file(tmp_path / "teacher/model.safetensors")) - set(made.state_dict())
    assert apart, "transformers saves experts as it has them: what is said of joined weights can go"
    told = r"where transformers joins weights as it loads them, .* give weights='teacher.pt' too"
    with pytest.raises(TeacherError, match=told):
        run.teacher(tmp_path / "teacher", placement="cpu")
    torch.save(made.state_dict(), tmp_path / "teacher.pt")
    teacher = run.teacher(tmp_path / "teacher", weights=tmp_path / "teacher.pt", placement="cpu")
    assert torch.equal(teacher(input_ids=WORDS).logits, made.requires_grad_(False)(input_ids=WORDS).logits)


@pytest.mark.slow
def test_a_head_that_the_architecture_lacks_stays_unused_and_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.random.fork_rng():
        made = transformers.BertForPreTraining(transformers.BertConfig(**SMALL))
    made.save_pretrained(tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher/config.json").read_text())
    (tmp_path / "teacher/config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    plain = transformers.BertForMaskedLM.from_pretrained(tmp_path / "teacher").eval()
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        for more in ({"placement": "cpu"}, {"placement": "served", "inner": "process"}):
            assert torch.equal(run.teacher(tmp_path / "teacher", **more)(input_ids=WORDS)[0], plain(input_ids=WORDS)[0])
    told = capsys.readouterr().out
    assert "teacher: 4 name(s) of" in told
    assert "are not in the module and stay unused, e.g. ['bert.pooler.dense.bias'" in told


def test_more_layers_than_the_configuration_has_are_no_unused_head(run, tmp_path):
    with torch.random.fork_rng():
        model("Llama").save_pretrained(tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher/config.json").read_text())
    (tmp_path / "teacher/config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(TeacherError, match=r"are not of one model: 9 name\(s\) of the file .*'model.layers.1."):
        run.teacher(tmp_path / "teacher", placement="cpu")


EVERY = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk", "sharded", "served", "cached", None)


def loop(run, teacher, **more):
    """What a script does with outputs, once for each epoch and micro-batch: two of each."""
    for epoch in run.shard(TensorDataset(torch.arange(24).view(4, 6)), num_workers=0, micro_batch=2).epochs(2):
        for step in epoch:
            for (ids,) in step:
                yield ids, teacher(input_ids=ids, **more)


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
@pytest.mark.parametrize("placement", EVERY)
def test_every_placement_gives_the_models_own_class_of_outputs(run, tmp_path, kind, placement):
    with torch.random.fork_rng():
        made = model(kind)
    made.save_pretrained(tmp_path / "teacher")
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    teacher = run.teacher(tmp_path / "teacher", placement=placement, **options)
    with torch.no_grad():
        for ids, found in loop(run, teacher, output_hidden_states=True):
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


@pytest.mark.parametrize("placement", EVERY)
def test_the_largest_logits_come_in_the_models_own_class(run, tmp_path, placement):
    with torch.random.fork_rng():
        made = model("Llama")
    made.save_pretrained(tmp_path / "teacher")
    options = {"device_map": {"": "cpu"}} if placement == "custom" else {}
    teacher = run.teacher(tmp_path / "teacher", placement=placement, top_k=3, **options)
    with torch.no_grad():
        for ids, found in loop(run, teacher):
            there = made.eval()(input_ids=ids, use_cache=False)
            assert type(found) is type(there)
            assert isinstance(found.logits, TopK)
            assert torch.equal(found.logits.values, there.logits.topk(3).values)
            assert found.loss is None


def test_logits_are_asked_for_where_outputs_as_a_whole_are_given():
    with torch.random.fork_rng():
        given = model("Llama")(input_ids=WORDS)
    for student, teacher, whose in ((given, given.logits, "student"), (given.logits, given, "teacher")):
        told = f"distill_loss got a CausalLMOutputWithPast for the {whose}'s logits: pass .logits of it"
        with pytest.raises(StepError, match=told):
            distill_loss(student, teacher)
    with pytest.raises(StepError, match=r"top_k got a CausalLMOutputWithPast for logits: pass .logits of it"):
        top_k(given, 2)
    with torch.random.fork_rng():
        given = model("Bert")(input_ids=WORDS)
    told = "match_features got a BaseModelOutput.* for the teacher's features: pass .last_hidden_state of it"
    with pytest.raises(StepError, match=told):
        match_features(given.last_hidden_state, given)


def test_a_folder_without_config_or_architecture_is_told(run, tmp_path):
    folder = save(speaker(), tmp_path / "teacher")
    with pytest.raises(TeacherError, match=r"there is no build= and .* holds no config.json"):
        run.teacher(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"config.json names no architecture: add .architectures"):
        run.teacher(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["SpeakerForNobody"]}))
    with pytest.raises(
        TeacherError, match=r"names the architecture 'SpeakerForNobody', which transformers .* does not"
    ):
        run.teacher(folder)


@pytest.mark.parametrize("named", ["pipeline", "AutoConfig", "set_seed", "__name__"])
def test_a_folder_may_name_a_model_of_transformers_and_nothing_else_in_it(run, tmp_path, named):
    folder = save(speaker(), tmp_path / "teacher")
    (folder / "config.json").write_text(json.dumps({"architectures": [named]}))
    with pytest.raises(TeacherError, match=f"names the architecture '{named}', which transformers .* does not"):
        run.teacher(folder)


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_configuration_that_is_none_is_told(run, tmp_path, text):
    folder = save(speaker(), tmp_path / "teacher")
    (folder / "config.json").write_text(text)
    with pytest.raises(TeacherError, match=r"config.json is no JSON object \(.*\): copy or download it anew"):
        run.teacher(folder)


def test_code_in_a_folder_is_neither_run_nor_asked_about(run, tmp_path, monkeypatch):
    folder = tmp_path / "teacher"
    model("Bert").save_pretrained(folder)
    (folder / "own.py").write_text("raise SystemExit('code of the folder was run')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))

    def asked(*_):
        raise AssertionError("it asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ValueError, match="trust_remote_code"):
        run.teacher(folder)


def test_without_transformers_a_folder_is_told_what_to_install(run, tmp_path, monkeypatch):
    folder = save(speaker(), tmp_path / "teacher")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TeacherError, match="transformers is not installed: type pip install 'samestep"):
        run.teacher(folder)


def test_the_name_of_a_model_on_the_hub_is_no_folder(run):
    told = r"run.teacher\('openai-community/gpt2'\): there is no such folder here, .* `hf download NAME "
    with pytest.raises(TeacherError, match=told):
        run.teacher("openai-community/gpt2", placement="cpu")
