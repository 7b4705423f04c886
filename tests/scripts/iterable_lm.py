"""A transformer trained on a stream of tokens from an IterableDataset, as llama2.c reads its pretokenized shards."""

import argparse
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH = 24, 12, 16


class Tokens(IterableDataset):
    """Chunks of the files in a random order that is the same in every process; samestep gives each rank its part."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        rng = random.Random(42)
        for file in rng.sample(self.files, len(self.files)):
            chunks = list(range(0, len(file) - LENGTH, LENGTH))
            rng.shuffle(chunks)
            for start in chunks:
                chunk = torch.tensor(file[start : start + LENGTH + 1])
                yield chunk[:-1], chunk[1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True, bias=False)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device, dtype=hidden.dtype)
        return self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))


files = [[(start + i * i // 5) % VOCABULARY for i in range(250)] for start in range(4)]  # stand in for files of tokens

with Run(global_batch=20, seed=0, folder=args.out) as run:
    gpt = GPT()
    model = run.wrap(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    stream = run.stream(Tokens(files), micro_batch=args.micro_batch)

    for epoch in stream.epochs(args.epochs):
        for step in epoch:
            for inputs, targets in step:
                losses = cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
                step.mean(losses).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as net:
            loss = run.mean(
                cross_entropy(net(inputs).transpose(1, 2), targets, reduction="none") for inputs, targets in stream
            )
        run.log({"epoch/loss": loss}, step=epoch.number)

    run.once(torch.save, gpt.state_dict(), run.folder / "weights.pt")
