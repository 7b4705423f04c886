import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXTS = [f"{a} {b} {c}" for a in ("red", "green", "blue", "old") for b in ("cat", "dog", "fox", "hen") for c in ("runs", "sits", "eats", "naps")]


def build_vocab(path):
    words = sorted({word for text in TEXTS for word in text.split()})
    with open(path, "w") as f:
        json.dump({word: i for i, word in enumerate(words)}, f)


class Sentences(Dataset):
    def __init__(self, vocab):
        self.ids = torch.tensor([[vocab[w] for w in text.split()] for text in TEXTS])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i, :2], self.ids[i, 2]


class BagOfWords(nn.Module):
    def __init__(self, vocab, d=16):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, d)
        self.out = nn.Linear(d, vocab)

    def forward(self, words):
        return self.out(self.emb(words))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = "vocab.json"
    if not os.path.exists(path):
        if rank == 0:
            build_vocab(path)
        dist.barrier()
    with open(path) as f:
        vocab = json.load(f)
    data = Sentences(vocab)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(BagOfWords(len(vocab)))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for words, target in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(words), target).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
