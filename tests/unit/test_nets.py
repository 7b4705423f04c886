"""Nets in which a sample sees no other, soft tokens before a language model, and sampling with luck of a sample."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from samestep import SamestepError
from samestep.data.sample_rng import SampleContext, sample_rng
from samestep.nn import embedded, losses_after, prefix_shape, unmask, unmasking_noise
from samestep.nn import layers as resnet
from samestep.nn import layers as transformer


@pytest.mark.parametrize("depth", [18, 50])
def test_what_a_residual_net_gives_for_an_image_depends_on_no_other(depth):
    torch.manual_seed(0)
    net = resnet(depth, channels=3, classes=5, width=8, small=True).train()
    images = torch.randn(4, 3, 16, 16)
    assert torch.allclose(net(images)[1:2], net(images[1:2]), atol=1e-5)
    assert sum(isinstance(part, torch.nn.Conv2d) for part in net.modules()) == {18: 20, 50: 53}[depth]


def test_large_images_are_halved_twice_before_the_first_block():
    images = torch.zeros(1, 3, 64, 64)
    stems = [resnet(18, channels=3, classes=2, width=8, small=small)[: 2 if small else 3] for small in (True, False)]
    assert [stem(images).shape[-1] for stem in stems] == [64, 16]


def test_blocks_of_a_transformer_draw_nothing():
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


def test_a_model_after_nothing_loses_what_it_loses_by_itself(lm):
    tokens = torch.tensor([[1, 4, 7, 2], [3, 3, 9, -1]])
    text, there = embedded(lm, tokens)
    assert there.tolist() == [[True] * 4, [True] * 3 + [False]]
    found = losses_after(lm, tokens, text[:, :0], there[:, :0])
    for row, length in enumerate((4, 3)):
        alone = tokens[row : row + 1, :length]
        logits = lm(alone).logits[0, :-1]
        wanted = torch.nn.functional.cross_entropy(logits, alone[0, 1:], reduction="none")
        assert torch.allclose(found[row, : length - 1], wanted, atol=1e-5)


def test_soft_tokens_stand_where_words_would_and_gradients_reach_them_and_the_prefix(lm):
    tokens = torch.tensor([[1, 4, 7, 2]])
    text, there = embedded(lm, tokens)
    after_itself = losses_after(lm, tokens, text, there)
    twice = lm(torch.cat([tokens, tokens], dim=1)).logits[0, 4:7]
    wanted = torch.nn.functional.cross_entropy(twice, tokens[0, 1:], reduction="none")
    assert torch.allclose(after_itself[0], wanted, atol=1e-5)
    assert prefix_shape(lm.config) == (2, 2, 2, 4)
    soft = torch.zeros(1, 3, 16, requires_grad=True)
    deep = torch.randn(2, 2, 1, 2, 3, 4, requires_grad=True)  # layers, key or value, row, heads, places, width
    losses_after(lm, tokens, soft, torch.ones(1, 3, dtype=torch.bool), deep).sum().backward()
    assert soft.grad is not None
    assert soft.grad.abs().sum() > 0
    assert deep.grad is not None
    assert (deep.grad.abs().sum(dim=(2, 3, 4, 5)) > 0).all()


def lucky(index):
    with SampleContext(seed=0, epoch=0, index=index):
        return unmasking_noise(6, 3, sample_rng())


def test_a_sample_is_drawn_alike_alone_and_among_others_and_every_place_once():
    rows = [lucky(index) for index in range(4)]
    order, noise = (torch.stack(each) for each in zip(*rows, strict=True))
    asked = []

    def predict(seen):
        asked.append(int((seen == 3).sum(1).unique()))
        return torch.zeros(*seen.shape, 3)

    together = unmask(predict, order, noise, passes=3)
    assert asked == [6, 4, 2]  # places that are still hidden
    assert together.max() <= 2
    alone = unmask(lambda seen: torch.zeros(*seen.shape, 3), order[2:3], noise[2:3], passes=3)
    assert torch.equal(together[2:3], alone)


def test_drawn_levels_follow_their_scores():
    luck = [unmasking_noise(50, 2, torch.Generator().manual_seed(seed)) for seed in range(40)]
    order, noise = (torch.stack(each) for each in zip(*luck, strict=True))
    odds = torch.tensor([0.2, 0.8]).log()
    drawn = unmask(lambda seen: odds.expand(*seen.shape, 2), order, noise, passes=1)
    assert drawn.float().mean() == pytest.approx(0.8, abs=0.03)


MISUSES = {
    "resnet does not know depth=34: use one of 18, 50": lambda: resnet(34, channels=3, classes=2),
    "resnet got width=12, the channels of its first layer: give a multiple of 8": (
        lambda: resnet(18, channels=3, classes=2, width=12)
    ),
    "transformer got width=50 and layers=2 with heads of 16: give a multiple of 16": (
        lambda: transformer(50, 2, head=16)
    ),
    "unmask got passes=0: give a whole number from 1 up": (
        lambda: unmask(lambda seen: seen, torch.zeros(1, 2).long(), torch.zeros(1, 2, 2), 0)
    ),
    "prefix_shape got a Generator without num_hidden_layers, num_attention_heads, hidden_size: give the": (
        lambda: prefix_shape(torch.Generator())
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_sizes_that_make_no_net_are_refused(text):
    with pytest.raises(SamestepError, match=re.escape(text)):
        MISUSES[text]()
