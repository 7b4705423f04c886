"""What docs/migrate-trainer.md says about the losses of transformers' Trainer, seen in that Trainer."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

LENGTHS = (4, 4, 19, 19)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 40, (length,), generator=generator) for length in LENGTHS]


def collate(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = pad_sequence(batch, batch_first=True)
    mask = tokens > 0
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def trainer_loss(model: PreTrainedModel, folder: Path, batch_size: int) -> float:
    arguments = TrainingArguments(str(folder), per_device_eval_batch_size=batch_size, report_to="none", use_cpu=True)
    return Trainer(model, arguments, eval_dataset=texts(), data_collator=collate).evaluate()["eval_loss"]


def token_losses(model: PreTrainedModel, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs = collate(batch)
    labels = inputs.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none")[labels != -100]


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=20, initializer_range=0.5, **sizes))


def test_models_of_other_names_count_the_first_label(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=20, n_embd=16, n_layer=1, n_head=2))
    losses = token_losses(model, texts())

    assert trainer_loss(model, tmp_path, 4) == pytest.approx(float(losses.sum()) / sum(LENGTHS), rel=1e-5)


def test_causal_language_models_do_not(llama, tmp_path):
    losses = token_losses(llama, texts())

    assert len(losses) == sum(LENGTHS) - len(LENGTHS)
    assert trainer_loss(llama, tmp_path, 4) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_the_evaluation_loss_is_a_mean_of_batch_means(llama, tmp_path):
    short, long = texts()[:2], texts()[2:]
    of_batches = (float(token_losses(llama, short).mean()) + float(token_losses(llama, long).mean())) / 2
    of_tokens = float(token_losses(llama, texts()).mean())

    assert abs(of_batches - of_tokens) > 1e-2, "these texts do not tell the two means apart"
    assert trainer_loss(llama, tmp_path, 2) == pytest.approx(of_batches, rel=1e-5)
