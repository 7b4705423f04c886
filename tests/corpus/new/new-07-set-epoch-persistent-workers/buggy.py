import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShuffledStream(IterableDataset):
    """Shuffles the list of documents anew in every epoch, then yields this process' part."""

    def __init__(self, docs, seed=0):
        super().__init__()
        self.docs = docs
        self.seed = seed
        self.epoch = 0
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.docs)))
        random.Random(self.seed + self.epoch).shuffle(order)
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        for i in order[self.rank * nw + wid :: self.world * nw]:
            yield self.docs[i]


class NextByte(nn.Module):
    def __init__(self, vocab=32, width=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Conv1d(width, width, 2)
        self.unembed = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.mix(self.embed(ids[:, :-1]).transpose(1, 2)).transpose(1, 2)
        return self.unembed(torch.relu(h))


def synth_docs(n=128, length=10):
    rng = random.Random(99)
    return [torch.tensor([rng.randrange(32) for _ in range(length)]) for _ in range(n)]


def main():
    dist.init_process_group("gloo")
    stream = ShuffledStream(synth_docs())
    loader = DataLoader(stream, batch_size=8, num_workers=1, persistent_workers=True)
    torch.manual_seed(0)
    lm = DDP(NextByte())
    opt = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for ids in loader:
            logits = lm(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
