"""Hugging Face folders: a model and its tokenizer, from a run or a checkpoint, for any strategy and number of ranks."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from samestep import Run
from samestep.checkpoint import export
from samestep.cli.main import main
from samestep.errors import CheckpointError

pytestmark = pytest.mark.slow

WORDS = [f"w{number}" for number in range(60)]
STRATEGIES = [(1, 1, None), (2, 1, "ddp"), (3, 1, "fsdp"), (2, 1, "zero2"), (4, 2, "hybrid")]


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # torch sets this permanently when transformers is first imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


@pytest.fixture
def base(tmp_path) -> Path:
    """The folder of a small language model with tied embeddings in bf16, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def build(base, adapter):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not adapter:
        return model
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(base, folder, strategy, adapter=False, merge=False):
    """Train two steps, save a checkpoint and a folder, and return the weights; more ranks resume from it."""
    rows = [torch.arange(start, start + 8) % len(WORDS) for start in range(16)]
    with Run(global_batch=8, seed=1, folder=folder / "logs") as run:
        model = run.wrap(build(base, adapter), strategy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        data = run.shard(rows, shuffle=True, num_workers=0)
        parts = {"model": model, "optimizer": optimizer, "train": data}
        checkpoint = run.checkpoint(folder / "out", trainable_only=adapter, **parts)
        for epoch in data.epochs(1):
            for step in epoch:
                for tokens in step:
                    logits = model(input_ids=tokens).logits[:, :-1]
                    losses = cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
                    step.mean(losses).backward()
                optimizer.step()
                optimizer.zero_grad()
        checkpoint.save()
        run.save_pretrained(model, folder / "live", merge=merge)
        state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        return {name: full(value).detach().clone() for name, value in state.items()}


def assert_same(weights, model):
    loaded = model.state_dict()
    assert weights.keys() == loaded.keys()
    assert [name for name in weights if not torch.equal(weights[name], loaded[name])] == []


@pytest.mark.parametrize(("size", "nodes", "strategy"), STRATEGIES)
def test_transformers_loads_the_same_bits_and_the_tokenizer(ranks, tmp_path, base, capfd, size, nodes, strategy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights, *_ = ranks(size, train, base, tmp_path, strategy, nodes=nodes)
    assert main(["checkpoint", "export", str(tmp_path / "out"), "--pretrained", "--to", str(tmp_path / "cli")]) == 0
    assert f"{tmp_path / 'cli'}: config.json, generation_config.json, model.safetensors, t" in capfd.readouterr().out
    for folder in (tmp_path / "live", tmp_path / "cli"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert type(model).__name__ == "LlamaForCausalLM"
        assert_same(weights, model)
        assert AutoTokenizer.from_pretrained(folder)("w3 w59 nothing").input_ids == [3, 59, 0]
    assert not torch.equal(weights["model.norm.weight"], build(base, False).state_dict()["model.norm.weight"])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("size", "nodes", "strategy"), STRATEGIES)
def test_an_adapter_is_written_alone_and_merged(ranks, tmp_path, base, capfd, size, nodes, strategy):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    weights, *_ = ranks(size, train, base, tmp_path, strategy, True, strategy == "fsdp", nodes=nodes)
    for option in ("pretrained", "merge"):
        to = str(tmp_path / option)
        assert main(["checkpoint", "export", str(tmp_path / "out"), f"--{option}", "--to", to, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["folder"] == to
    for name in ("pretrained", *(() if strategy == "fsdp" else ("live",))):
        model = PeftModel.from_pretrained(build(base, False), tmp_path / name)
        assert_same(weights, model)
        assert (tmp_path / name / "tokenizer.json").is_file()
        assert not (tmp_path / name / "model.safetensors").exists()
    own = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "pretrained", dtype=torch.float32)
    assert_same(weights, own)
    merged = own.merge_and_unload().state_dict()
    for name in ("merge", *(("live",) if strategy == "fsdp" else ())):
        assert_same(merged, AutoModelForCausalLM.from_pretrained(tmp_path / name))
    names = {path.name for path in (tmp_path / "merge").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_training_continues_after_a_merged_folder_was_written_and_it_is_replaced(base, tmp_path):
    from transformers import AutoModelForCausalLM

    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = run.wrap(build(base, adapter=True))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        run.save_pretrained(model, tmp_path / "merged", merge=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        first = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
        run.save_pretrained(model, tmp_path / "merged", merge=True)
        second = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
        after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if "lora_B" not in name)
    assert not torch.equal(*(each["model.layers.0.self_attn.q_proj.weight"] for each in (first, second)))


def gradients(base, folder, **options):
    with Run(global_batch=4, seed=0, folder=folder / "logs") as run:
        model = run.wrap(build(base, adapter=False), **options)
        for epoch in run.shard([torch.arange(8) + start for start in range(4)], num_workers=0).epochs(1):
            for step in epoch:
                for tokens in step:
                    logits = model(input_ids=tokens).logits[:, :-1]
                    step.mean(cross_entropy(logits.mT, tokens[:, 1:], reduction="none")).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_layers_that_are_recomputed_do_not_fill_their_cache_twice(base, tmp_path):
    from transformers.modeling_layers import GradientCheckpointingLayer

    expected = gradients(base, tmp_path)
    found = gradients(base, tmp_path, activation_checkpointing=(GradientCheckpointingLayer,))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def save_checkpoint(folder, model, **options):
    with Run(global_batch=2, folder=folder / "logs") as run:
        run.checkpoint(folder / "out", model=model, **options).save()


def test_another_base_model_is_not_merged(base, tmp_path):
    other = tmp_path / "other"
    save_checkpoint(tmp_path, build(base, adapter=True), trainable_only=True)
    model = build(base, adapter=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(other)
    message = (
        r"frozen tensors differ .*: base_model\.model\.model\.norm\.weight has other values; pass --base the folder"
    )
    with pytest.raises(CheckpointError, match=message):
        export.export_pretrained(tmp_path / "out", tmp_path / "merged", base=other, merge=True)
    assert not (tmp_path / "merged").exists()
    with pytest.raises(CheckpointError, match=r"the base model .*nowhere is not a folder: pass the one that training"):
        export.export_pretrained(tmp_path / "out", tmp_path / "merged", base=tmp_path / "nowhere", merge=True)
    base.rename(tmp_path / "moved")
    message = "only trainable tensors, and the folder that training started from is not recorded or not on this machine"
    with pytest.raises(CheckpointError, match=message):
        export.export_pretrained(tmp_path / "out", tmp_path / "merged", merge=True)
    assert main(["checkpoint", "export", str(tmp_path / "out"), "--merge", "--base", str(tmp_path / "moved"), "--to",
                 str(tmp_path / "merged")]) == 0  # fmt: skip


def test_what_cannot_be_exported_is_named(base, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, build(base, adapter=False))
    target = tmp_path / "model"
    with pytest.raises(CheckpointError, match="is a LlamaForCausalLM without adapters of peft, so there is nothing to"):
        export.export_pretrained(tmp_path / "out", target, merge=True)
    with pytest.raises(CheckpointError, match=r"base already exists: choose another folder, or remove it"):
        export.export_pretrained(tmp_path / "out", base)
    with pytest.raises(CheckpointError, match=r"out already exists and is not the folder of a model: choose another"):
        export.export_pretrained(tmp_path / "out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        message = r"needs transformers, which is not installed: pip install 'samestep\[huggingface\]'"
        with pytest.raises(CheckpointError, match=message):
            export.export_pretrained(tmp_path / "out", target)
    own = build(base, adapter=False)
    own.__class__ = type("OwnModel", (type(own),), {})
    save_checkpoint(tmp_path / "own", own)
    with pytest.raises(CheckpointError, match=r"transformers .* has no model OwnModel: use the version that the model"):
        export.export_pretrained(tmp_path / "own" / "out", target)
    assert not target.exists()
    plain = tmp_path / "plain"
    save_checkpoint(plain, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="has no configuration of 'model', which was not a model of transformers"):
        export.export_pretrained(plain / "out", target)
    with (
        Run(global_batch=2, folder=tmp_path / "logs") as run,
        pytest.raises(
            CheckpointError, match=r"run\.save_pretrained got a Linear, which is not a model of transformers"
        ),
    ):
        run.save_pretrained(nn.Linear(2, 2), target)


def test_a_model_that_differs_from_its_configuration_is_not_written(base, tmp_path):
    model = build(base, adapter=False)
    model.extra = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model)
    message = (
        r"LlamaForCausalLM, as it is built .*, has other tensors than the trained model: extra\.bias, extra\.weight"
    )
    with pytest.raises(CheckpointError, match=message):
        export.export_pretrained(tmp_path / "out", tmp_path / "model")


def test_an_adapter_folder_that_would_lose_trained_weights_is_not_written(base, tmp_path):
    model = build(base, adapter=True)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    save_checkpoint(tmp_path, model, trainable_only=True)
    message = (
        r"does not contain 1 trained tensor\(s\): base_model\.model\.model\.norm\.weight; write the whole model with"
    )
    with pytest.raises(CheckpointError, match=message):
        export.export_pretrained(tmp_path / "out", tmp_path / "adapter")
    export.export_pretrained(tmp_path / "out", tmp_path / "merged", merge=True)


def test_export_to_a_file_says_which_tensors_are_missing(base, tmp_path, capfd):
    save_checkpoint(tmp_path, build(base, adapter=True), trainable_only=True)
    assert main(["checkpoint", "export", str(tmp_path / "out"), "--to", str(tmp_path / "file")]) == 0
    out = capfd.readouterr().out
    assert f"{tmp_path / 'file'}: 8 tensors, " in out
    assert "does not contain 21 frozen tensors: add --pretrained or --merge for a whole model" in out


def test_a_tokenizer_of_ones_own_is_saved(base, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["new"])
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        model = run.wrap(build(base, adapter=False))
        run.save_pretrained(model, tmp_path / "a", tokenizer=tokenizer)
        run.save_pretrained(model, tmp_path / "b", tokenizer=tmp_path / "a")
        adapted = run.wrap(build(base, adapter=True))
        run.save_pretrained(adapted, tmp_path / "c", tokenizer=tmp_path / "a")
        with pytest.raises(
            CheckpointError, match=r"tokenizer='.*nowhere' of run\.save_pretrained is not a folder: pass"
        ):
            run.save_pretrained(model, tmp_path / "d", tokenizer=tmp_path / "nowhere")
        with pytest.raises(
            CheckpointError, match=r"tokenizer= of run\.save_pretrained is a Tokenizer without save_pre"
        ):
            run.save_pretrained(model, tmp_path / "d", tokenizer=tokenizer.backend_tokenizer)
    for name in ("a", "b", "c"):
        assert AutoTokenizer.from_pretrained(tmp_path / name)("w3 new").input_ids == [3, 60]
    config = json.loads((tmp_path / "c" / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == str(base)
    assert not (tmp_path / "d").exists()
