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
