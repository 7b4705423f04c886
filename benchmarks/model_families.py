"""Models of benchmarks/memory.py that are not plain convolutions or decoders: one family of layers each.

Every function returns a model, a batch of `samples` samples, and a loss per sample.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, l1_loss

from samestep.nn import linear_cross_entropy


def images(samples: int, size: int):
    return torch.randn(samples, 3, size, size)


def labels(samples: int, classes: int):
    return torch.randint(0, classes, (samples,))


def token_losses(logits, targets):
    """The mean cross entropy of the tokens of each sample."""
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


class ChunkedGPT2(nn.Module):
    """GPT-2 small that returns losses, without the logits of all tokens and without attention dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, use_cache=False))

    def forward(self, tokens):
        """Losses of the tokens after the first, averaged per sample."""
        hidden = self.model.transformer(tokens).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], self.model.lm_head.weight, tokens[:, 1:]).mean(1)


def chunked_gpt2(samples: int):
    tokens = torch.randint(0, 50257, (samples, 1024))
    return ChunkedGPT2(), (tokens,), lambda model, batch: model(batch[0])


class Words(nn.Module):
    """A language model of stacked LSTM layers."""

    def __init__(self, words: int = 10000, width: int = 1024, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(words, width), nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        """Run the model."""
        return self.head(self.drop(self.lstm(self.drop(self.embedding(tokens)))[0]))


def lstm(samples: int):
    tokens = torch.randint(0, 10000, (samples, 256))
    return Words(), (tokens, tokens), lambda model, batch: token_losses(model(batch[0]), batch[1])


class Tagger(nn.Module):
    """A bidirectional GRU with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(256, 512, 3, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(1024, 50)

    def forward(self, x):
        """Run the model."""
        return self.head(self.gru(x)[0])


def gru(samples: int):
    batch = torch.randn(samples, 400, 256), torch.randint(0, 50, (samples, 400))
    return Tagger(), batch, lambda model, batch: token_losses(model(batch[0]), batch[1])


def mixtral(samples: int):
    """A mixture of 8 experts, of which each token uses two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        use_cache=False,
    )
    tokens = torch.randint(0, 32000, (samples, 1024))
    loss = lambda model, batch: token_losses(model(batch[0]).logits, batch[1])  # noqa: E731
    return MixtralForCausalLM(config), (tokens, tokens), loss


def wav2vec2(samples: int):
    """A stack of 1-D convolutions over 5 s of sound, then a transformer, fine-tuned to classify."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    model = Wav2Vec2ForSequenceClassification(Wav2Vec2Config(num_labels=35, layerdrop=0.0))
    batch = torch.randn(samples, 80000), labels(samples, 35)
    return model, batch, lambda model, batch: cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


def t5(samples: int):
    """An encoder-decoder: T5 small."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=6, d_model=512, d_ff=2048, num_heads=8, use_cache=False, decoder_start_token_id=0)
    source, target = torch.randint(0, 32000, (samples, 512)), torch.randint(0, 32000, (samples, 128))

    def loss(model, batch):
        return token_losses(model(input_ids=batch[0], decoder_input_ids=batch[1]).logits, batch[1])

    return T5ForConditionalGeneration(config), (source, target), loss


def convnext(samples: int):
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(ConvNextConfig(num_labels=1000))
    batch = images(samples, 224), labels(samples, 1000)
    return model, batch, lambda model, batch: cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


def segformer(samples: int):
    """SegFormer-B2: scores at a quarter of the image size, upsampled for the loss."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768)
    config.num_labels = 150

    def loss(model, batch):
        scores = interpolate(model(batch[0]).logits, (512, 512), mode="bilinear")
        return cross_entropy(scores, batch[1], reduction="none").mean((1, 2))

    batch = images(samples, 512), torch.randint(0, 150, (samples, 512, 512))
    return SegformerForSemanticSegmentation(config), batch, loss


class Detector(nn.Module):
    """A convolutional detector in the style of FCOS: only locations inside of objects have a box."""

    def __init__(self, width: int = 256, classes: int = 80) -> None:
        super().__init__()
        sizes = [(3, 64), (64, 128), (128, width), (width, width)]
        self.trunk = nn.Sequential(
            *(m for a, b in sizes for m in (nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(32, b), nn.ReLU()))
        )
        self.head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(32, width), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(width, classes, 1), nn.Conv2d(width, 4, 1)

    def forward(self, x):
        """Scores of every location of every class, and boxes."""
        x = self.head(self.trunk(x))
        return self.scores(x).permute(0, 2, 3, 1), self.boxes(x).permute(0, 2, 3, 1)


def detector(samples: int):
    """Labels are -1 outside of objects; a mask selects the boxes that count, so their number depends on the data."""
    classes = torch.full((samples, 32, 32), -1)
    for row in range(samples):
        side = 4 + row % 5
        classes[row, 8 : 8 + side, 10 : 10 + 2 * side] = row % 80

    def loss(model, batch):
        scores, boxes = model(batch[0])
        inside = batch[1] >= 0
        found = cross_entropy(scores[inside], batch[1][inside], reduction="none")
        distances = l1_loss(boxes[inside], batch[2][inside], reduction="none").mean(1)
        rows = inside.nonzero()[:, 0]
        confident = scores.sigmoid().amax(-1).mean((1, 2))
        return confident + torch.zeros(len(inside), device=rows.device).index_add(0, rows, (found + distances).float())

    return Detector(), (images(samples, 512), classes, torch.rand(samples, 32, 32, 4)), loss


class Proposals(nn.Module):
    """A detector with two stages: the second sees the locations whose score the first finds high."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.trunk = Detector(width).trunk
        self.score, self.second = nn.Conv2d(width, 1, 1), nn.Sequential(nn.Linear(width, 1024), nn.ReLU())
        self.head = nn.Linear(1024, 80)

    def forward(self, x):
        """Scores of locations, and classes of those with a score above zero."""
        x = self.trunk(x)
        scores = self.score(x)[:, 0]
        chosen = scores > 0
        return scores, self.head(self.second(x.permute(0, 2, 3, 1)[chosen])), chosen.nonzero()[:, 0]


def proposals(samples: int):
    """How many locations the second stage sees depends on the weights, so a trace cannot know it."""

    def loss(model, batch):
        scores, classes, rows = model(batch[0])
        found = cross_entropy(classes, batch[1][rows], reduction="none")
        return scores.square().mean((1, 2)) + scores.new_zeros(len(scores)).index_add(0, rows, found.to(scores.dtype))

    return Proposals(), (images(samples, 256), labels(samples, 80)), loss


FAMILIES: dict[str, Callable] = {
    "chunked-gpt2": chunked_gpt2,
    "lstm": lstm,
    "gru": gru,
    "mixtral": mixtral,
    "wav2vec2": wav2vec2,
    "t5": t5,
    "convnext": convnext,
    "segformer": segformer,
    "detector": detector,
    "proposals": proposals,
}
