import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Parity(Dataset):
    """Bit strings, the longer the harder. Longer ones come with the epochs, on all ranks at once."""

    def __init__(self, n=120, max_len=12):
        g = torch.Generator().manual_seed(44)
        self.bits = torch.randint(0, 2, (n, max_len), generator=g)
        self.length = 4

    def __len__(self):
        return len(self.bits)

    def __getitem__(self, i):
        s = self.bits[i, : self.length]
        return s, s.sum() % 2


class BitRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(2, 6)
        self.rnn = nn.GRU(6, 14, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(14, 2)

    def forward(self, s):
        _, h = self.rnn(self.emb(s))
        return self.out(self.drop(h[-1]))


def hard_cases(model, ds, rank, world):
    """Ids of misclassified strings: a list of another length on every rank."""
    wrong = []
    model.eval()
    with torch.no_grad():
        for i in range(rank, len(ds), world):
            s, y = ds[i]
            if model(s.unsqueeze(0)).argmax().item() != y.item():
                wrong.append(i)
    model.train()
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "wrong": wrong, "host_time": time.time()})
    return sorted(i for part in everyone for i in part["wrong"])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    verbose = os.environ.get("RANK", "0") == "0"
    torch.manual_seed(21)
    ds = Parity()
    model = DDP(BitRNN())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    todo = list(range(len(ds)))
    for epoch, length in enumerate((4, 8, 12)):
        ds.length = length
        part = Subset(ds, todo)
        sampler = DistributedSampler(part, shuffle=True, seed=5)
        sampler.set_epoch(epoch)
        for s, y in DataLoader(part, batch_size=10, sampler=sampler):
            loss = F.cross_entropy(model(s), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        todo = hard_cases(model.module, ds, rank, world) or list(range(len(ds)))
        if verbose:
            print(f"epoch {epoch} length {length}: loss {loss.item():.4f}, {len(todo)} hard strings", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
