"""An LSTM language model that carries its state through a long text, after pytorch/examples/word_language_model.

As there, the text is cut into parallel streams and the layout is (time, streams, features). Sample number i is the next
chunk of stream i % STREAMS, so that every step holds the next chunk of every stream, in the same order. The state is
stored by stream: a rank reads and writes the streams of its rows.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()

STREAMS, CHUNK, VOCABULARY, WIDTH, LAYERS = 10, 5, 20, 16, 2

# a text in which the next word depends on words far back
text = [1, 2, 3]
while len(text) < STREAMS * 61:
    text.append((text[-1] + text[-3] + len(text) % 7) % VOCABULARY)


class Chunks(Dataset):
    """The next CHUNK words of a stream, the words that follow them, and the number of the stream."""

    def __init__(self):
        self.streams = torch.tensor(text).reshape(STREAMS, -1)

    def __len__(self):
        return STREAMS * ((self.streams.shape[1] - 1) // CHUNK)

    def __getitem__(self, index):
        number, stream = index // STREAMS, index % STREAMS
        words = self.streams[stream, number * CHUNK : (number + 1) * CHUNK + 1]
        return words[:-1], words[1:], stream


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words, state):
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return self.decoder(self.drop(output)), state


with Run(global_batch=STREAMS, seed=0, folder=args.out) as run:
    net = RNNModel()
    model = run.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    train = run.shard(Chunks(), micro_batch=args.micro_batch)  # not shuffled: the next step continues the text

    for epoch in train.epochs(args.epochs):
        hidden = net.encoder.weight.new_zeros(LAYERS, STREAMS, WIDTH)
        cell = torch.zeros_like(hidden)
        for step in epoch:
            for words, targets, streams in step:
                logits, state = model(words.T, (hidden[:, streams], cell[:, streams]))
                hidden[:, streams], cell[:, streams] = (part.detach() for part in state)
                losses = cross_entropy(logits.flatten(0, 1), targets.T.flatten(), reduction="none")
                step.mean(losses.reshape(CHUNK, -1).T).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()

    run.once(torch.save, net.state_dict(), run.folder / "weights.pt")
