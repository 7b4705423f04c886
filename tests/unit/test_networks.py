"""Networks whose samples are independent, prefixes of language models, and sampling keyed by sample."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from samestep import SamestepError
from samestep.data.sample_rng import SampleContext, sample_rng
from samestep.nn import (
    embed_tokens,
    losses_with_prefix,
    prefix_shape,
    resnet,
    transformer,
    unmask,
    unmasking_noise,
)


@pytest.mark.parametrize("depth", [18, 50])
def test_the_output_of_a_resnet_does_not_depend_on_other_images(depth):
    torch.manual_seed(0)
    net = resnet(depth, channels=3, classes=5, width=8, small=True).train()
    images = torch.randn(4, 3, 16, 16)
    assert torch.allclose(net(images)[1:2], net(images[1:2]), atol=1e-5)
    assert sum(isinstance(part, torch.nn.Conv2d) for part in net.modules()) == {18: 20, 50: 53}[depth]


def test_large_images_are_downsampled_twice_before_the_first_block():
    images = torch.zeros(1, 3, 64, 64)
    stems = [resnet(18, channels=3, classes=2, width=8, small=small)[: 2 if small else 3] for small in (True, False)]
    assert [stem(images).shape[-1] for stem in stems] == [64, 16]


def test_transformer_blocks_have_no_randomness():
    torch.manual_seed(0)
    blocks = transformer(32, 2, head=16).train()
    rows = torch.randn(3, 5, 32)
    assert torch.equal(blocks(rows), blocks(rows))
    assert len(blocks.layers) == 2


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, **heads)).eval().requires_grad_(False)


def test_losses_with_an_empty_prefix_are_those_of_the_model(lm):
    tokens = torch.tensor([[1, 4, 7, 2], [3, 3, 9, -1]])
    text, mask = embed_tokens(lm, tokens)
    assert mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    found = losses_with_prefix(lm, tokens, text[:, :0], mask[:, :0])
    for row, length in enumerate((4, 3)):
        alone = tokens[row : row + 1, :length]
        logits = lm(alone).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, alone[0, 1:], reduction="none")
        assert torch.allclose(found[row, : length - 1], expected, atol=1e-5)


def test_soft_tokens_act_like_words_and_gradients_reach_them_and_the_key_values(lm):
    tokens = torch.tensor([[1, 4, 7, 2]])
    text, mask = embed_tokens(lm, tokens)
    after_the_text = losses_with_prefix(lm, tokens, text, mask)
    twice = lm(torch.cat([tokens, tokens], dim=1)).logits[0, 4:7]
    expected = torch.nn.functional.cross_entropy(twice, tokens[0, 1:], reduction="none")
    assert torch.allclose(after_the_text[0], expected, atol=1e-5)
    assert prefix_shape(lm.config) == (2, 2, 2, 4)
    soft = torch.zeros(1, 3, 16, requires_grad=True)
    key_values = torch.randn(2, 2, 1, 2, 3, 4, requires_grad=True)  # layers, key or value, row, heads, positions, width
    losses_with_prefix(lm, tokens, soft, torch.ones(1, 3, dtype=torch.bool), key_values).sum().backward()
    assert soft.grad is not None
    assert soft.grad.abs().sum() > 0
    assert key_values.grad is not None
    assert (key_values.grad.abs().sum(dim=(2, 3, 4, 5)) > 0).all()


def language_models():
    """Models whose logits are those of a linear layer, and models that change them: their head or its output."""
    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 11, "head_dim": 4}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    lm = LlamaForCausalLM(LlamaConfig(**size))
    with_bias = LlamaForCausalLM(LlamaConfig(**size))
    with_bias.lm_head = torch.nn.Linear(16, 11)
    own_head = LlamaForCausalLM(LlamaConfig(**size))
    own_head.lm_head = torch.nn.Sequential(torch.nn.Linear(16, 11))
    return {
        "llama": lm,
        "bias": with_bias,
        "softcap": Gemma2ForCausalLM(Gemma2Config(**size, final_logit_softcapping=0.3)),
        "scale": CohereForCausalLM(CohereConfig(**size, logit_scale=3.0, bos_token_id=1, eos_token_id=2)),
        "sequential": own_head,
    }


class Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of rows of the largest matrix of logits."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() and result.shape[-1] == 11:
            self.rows = max(self.rows, result.numel() // 11)
        return result


@pytest.mark.parametrize("name", ["llama", "bias", "softcap", "scale", "sequential"])
@pytest.mark.parametrize("frozen", [True, False])
def test_losses_with_a_prefix_are_those_of_all_logits(name, frozen):
    """The logits of the whole text and their cross entropy, as the losses were computed before."""
    lm = language_models()[name].double().eval().requires_grad_(not frozen)
    tokens = torch.tensor([[1, 4, 7, 2, 9], [3, 3, 9, -1, -1], [5, 6, 8, 10, -1]])
    text, mask = embed_tokens(lm, tokens)
    soft = torch.randn(3, 2, 16, requires_grad=True)
    prefix_mask = torch.ones(3, 2, dtype=torch.bool)
    attention = torch.cat([prefix_mask, mask], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = torch.cat([soft, text], 1).to(lm.dtype)
    logits = lm(inputs_embeds=inputs, attention_mask=attention.long(), position_ids=positions).logits[:, 2:-1]
    plain = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none", ignore_index=-1
    ).view(3, 4)
    trained = [soft, *(p for p in lm.parameters() if p.requires_grad)]
    expected = torch.autograd.grad((plain * torch.arange(1, 5)).sum(), trained, retain_graph=True)
    for _ in range(2):  # what the first call learns about the model, the second uses
        found = losses_with_prefix(lm, tokens, soft, prefix_mask)
        assert (found - plain).abs().max() < 1e-6  # the embeddings of the text are rounded to fp32
        gradients = torch.autograd.grad((found * torch.arange(1, 5)).sum(), trained)
        assert max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True)) < 1e-5


def test_the_logits_of_all_tokens_of_a_text_exist_only_if_the_model_changes_them():
    tokens = torch.randint(0, 11, (4, 50))
    models, rows = language_models(), {}
    for name in ("llama", "softcap"):
        text, mask = embed_tokens(models[name], tokens)
        losses_with_prefix(models[name], tokens, text[:, :0], mask[:, :0])
        with Widest() as widest, torch.no_grad(), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("samestep.nn.linear_loss._LOGITS_BYTES", 11 * 4 * 30)
            losses_with_prefix(models[name], tokens, text[:, :0], mask[:, :0])
        rows[name] = widest.rows
    assert rows == {"llama": 30, "softcap": 200}


def noise_of_sample(index):
    with SampleContext(seed=0, epoch=0, index=index):
        return unmasking_noise(6, 3, sample_rng())


def test_a_sample_does_not_depend_on_others_and_every_position_is_drawn_once():
    rows = [noise_of_sample(index) for index in range(4)]
    order, noise = (torch.stack(each) for each in zip(*rows, strict=True))
    masked = []

    def predict(levels):
        masked.append(int((levels == 3).sum(1).unique()))
        return torch.zeros(*levels.shape, 3)

    together = unmask(predict, order, noise, passes=3)
    assert masked == [6, 4, 2]  # positions that are still masked
    assert together.max() <= 2
    alone = unmask(lambda levels: torch.zeros(*levels.shape, 3), order[2:3], noise[2:3], passes=3)
    assert torch.equal(together[2:3], alone)


def test_levels_are_drawn_with_the_probabilities_of_their_scores():
    draws = [unmasking_noise(50, 2, torch.Generator().manual_seed(seed)) for seed in range(40)]
    order, noise = (torch.stack(each) for each in zip(*draws, strict=True))
    odds = torch.tensor([0.2, 0.8]).log()
    samples = unmask(lambda levels: odds.expand(*levels.shape, 2), order, noise, passes=1)
    assert samples.float().mean() == pytest.approx(0.8, abs=0.03)


MISUSES = {
    "resnet does not know depth=34: use one of 18, 50": lambda: resnet(34, channels=3, classes=2),
    "resnet got width=12, the channels of its first layer: pass a multiple of 8": (
        lambda: resnet(18, channels=3, classes=2, width=12)
    ),
    "transformer got width=50 and layers=2 with heads of width 16: pass a multiple of 16": (
        lambda: transformer(50, 2, head=16)
    ),
    "unmask got passes=0: pass an integer from 1 to the number of positions": (
        lambda: unmask(lambda levels: levels, torch.zeros(1, 2).long(), torch.zeros(1, 2, 2), 0)
    ),
    "prefix_shape got a Generator without num_hidden_layers, num_attention_heads, hidden_size: pass the": (
        lambda: prefix_shape(torch.Generator())
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_invalid_sizes_raise(text):
    with pytest.raises(SamestepError, match=re.escape(text)):
        MISUSES[text]()
