"""A student built from the folder of its teacher: with layers of the teacher, or narrower with random weights."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertModel,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5Model,
)

from samestep.assets import minilm
from samestep.errors import TeacherError
from samestep.teacher import Student, mean_pool

QUERY = "encoder.layer.{}.attention.self.query.weight"
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def _inductor_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_a_narrow_student_has_random_weights_and_a_projection():
    torch.manual_seed(0)
    student = Student(minilm(), learns="features", layers=1, width=64)
    tokens = torch.randint(1000, (3, 5))
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert student(tokens, torch.ones_like(tokens)).shape == (3, student.teacher_width) == (3, 384)


def test_a_wide_student_starts_with_layers_of_its_teacher_also_from_shards(tmp_path):
    for path in minilm().glob("*.json"):
        shutil.copy(path, tmp_path)
    state = load_file(minilm() / "model.safetensors")
    shards = {f"model-{at}.safetensors": dict(list(state.items())[at::2]) for at in range(2)}
    for name, part in shards.items():
        save_file(part, tmp_path / name, {"format": "pt"})
    listed = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    students = [Student(folder, learns="features", layers=2) for folder in (minilm(), tmp_path)]
    with safe_open(minilm() / "model.safetensors", "pt") as weights:
        for mine, theirs in ((0, 0), (1, 5)):
            for student in students:
                wanted = weights.get_tensor(QUERY.format(theirs))
                assert torch.equal(student.body.get_parameter(QUERY.format(mine)), wanted)
    assert not students[0].body.get_input_embeddings().weight.requires_grad
    assert [kind.__name__ for kind in students[0].blocks()] == ["BertLayer"]


def test_mean_pool_averages_the_tokens_in_the_mask():
    hidden = torch.tensor([[[2.0], [4.0], [9.0]]]).half()
    found = mean_pool(hidden, torch.tensor([[1, 1, 0]]))
    assert (found.tolist(), found.dtype) == ([[3.0]], torch.float32)


INVALID_ARGUMENTS = {
    "Student got learns='words': use one of features, logits": {"learns": "words", "layers": 1},
    "Student got layers=7 for a teacher with 6 layers: pass 1 to 6": {"learns": "features", "layers": 7},
    "Student got width=100: pass a multiple of 32, or None for the teacher's width": (
        {"learns": "features", "layers": 1, "width": 100}
    ),
}


@pytest.mark.parametrize("text", INVALID_ARGUMENTS)
def test_invalid_arguments_are_rejected(text):
    with pytest.raises(TeacherError, match=re.escape(text)):
        Student(minilm(), **INVALID_ARGUMENTS[text])


def test_a_file_without_the_weights_of_the_student_is_rejected(tmp_path):
    for path in minilm().glob("*.json"):
        shutil.copy(path, tmp_path)
    save_file({"other.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    text = "does not hold embeddings.word_embeddings.weight, which a BertModel student starts with: pass width="
    with pytest.raises(TeacherError, match=re.escape(text)):
        Student(tmp_path, learns="features", layers=1)


LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
# For each model a configuration with four small layers, and the name of its list of layers.
MODELS = {
    GPT2LMHeadModel: (GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=20, n_positions=8), "transformer.h"),
    GPT2Model: (GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=20, n_positions=8), "h"),
    DistilBertModel: (
        DistilBertConfig(n_layers=4, dim=16, hidden_dim=32, n_heads=2, vocab_size=20, max_position_embeddings=8),
        "transformer.layer",
    ),
    LlamaForCausalLM: (LlamaConfig(num_hidden_layers=4, vocab_size=20, **LLAMA), "model.layers"),
    Qwen2ForCausalLM: (Qwen2Config(num_hidden_layers=4, vocab_size=20, **LLAMA), "model.layers"),
}
CASES = [(kind, "features") for kind in MODELS] + [
    (kind, "logits") for kind in (GPT2LMHeadModel, GPT2Model, LlamaForCausalLM, Qwen2ForCausalLM)
]


def saved(kind, config, folder):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("kind", "learns"), CASES)
def test_layers_come_from_all_over_the_depth_in_every_architecture(tmp_path, kind, learns):
    config, layers = MODELS[kind]
    teacher = saved(kind, config, tmp_path)
    student = Student(tmp_path, learns=learns, layers=2)
    (mine,) = [part for part in student.body.modules() if isinstance(part, torch.nn.ModuleList)]
    theirs = teacher.get_submodule(layers)
    assert len(mine) == 2
    for layer, at in zip(mine, (0, 3), strict=True):
        wanted = dict(theirs[at].named_parameters())
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, wanted[name]), (name, at)
    assert torch.equal(student.body.get_input_embeddings().weight, teacher.get_input_embeddings().weight)
    assert student.blocks() == (type(theirs[0]),)
    assert student(TOKENS, torch.ones_like(TOKENS)).shape == ((2, 6, 20) if learns == "logits" else (2, 16))


@pytest.mark.parametrize("kind", MODELS)
def test_a_student_has_no_dropout(tmp_path, kind):
    saved(kind, MODELS[kind][0], tmp_path)
    student = Student(tmp_path, learns="features", layers=2).train()
    before = torch.get_rng_state()
    found = [student(TOKENS, torch.ones_like(TOKENS)) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", MODELS)
def test_a_narrow_student_has_narrow_layers_in_every_architecture(tmp_path, kind):
    saved(kind, MODELS[kind][0], tmp_path)
    student = Student(tmp_path, learns="features", layers=2, width=32)
    assert student(TOKENS, torch.ones_like(TOKENS)).shape == (2, 16)
    assert max(max(p.shape) for p in student.body.get_submodule(f"{student._stack()}.0").parameters()) == 128


UNSUPPORTED = {
    "it has an encoder and a decoder, but a student has one stack of layers": (
        T5Model,
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=20),
        "features",
    ),
    "its configuration has no hidden_size": (
        CLIPModel,
        CLIPConfig(
            text_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20},
            vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
        ),
        "features",
    ),
    "AutoModelForCausalLM of transformers": (DistilBertModel, MODELS[DistilBertModel][0], "logits"),
    "its layers must be one list of 2, but its lists are encoder.albert_layer_groups of 1": (
        AlbertModel,
        AlbertConfig(
            hidden_size=16, embedding_size=8, num_attention_heads=2, intermediate_size=32, num_hidden_layers=4
        ),
        "features",
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_an_unsupported_architecture_is_rejected(tmp_path, reason):
    kind, config, learns = UNSUPPORTED[reason]
    saved(kind, config, tmp_path)
    text = f"cannot make a student of {tmp_path}, a {config.model_type!r} model: {reason}"
    with pytest.raises(TeacherError, match=re.escape(text)) as caught:
        Student(tmp_path, learns=learns, layers=2)
    assert "or build the student yourself: it can be any module" in str(caught.value)
