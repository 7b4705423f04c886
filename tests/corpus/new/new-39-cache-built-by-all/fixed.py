from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards pack a dozen boxes of liquor jugs " * 24


def tokenize(text):
    letters = sorted(set(text))
    return np.array([letters.index(c) for c in text], dtype=np.int64)


def tokens(path=Path("cache/tokens.npy")):
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        np.save(path, tokenize(TEXT))
    return np.load(path)


class NextLetter(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(vocab, 12), nn.GRU(12, 24, batch_first=True), nn.Linear(24, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        tokens()
    dist.barrier()
    ids = torch.from_numpy(tokens())
    rows = ids[: len(ids) // 17 * 17].view(-1, 17)
    data = TensorDataset(rows[:128])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    vocab = int(ids.max()) + 1
    model = DDP(NextLetter(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (row,) in loader:
            logits = model(row[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, vocab), row[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
