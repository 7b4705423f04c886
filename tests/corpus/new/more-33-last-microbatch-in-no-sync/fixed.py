import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUM_GRAD = 3


class Phones(Dataset):
    def __init__(self, n=144, t=10):
        g = torch.Generator().manual_seed(48)
        self.feat = torch.randn(n, t, 5, generator=g)
        self.phone = (self.feat.sum(-1) > 0).long() + (self.feat[..., 0] > 1).long()

    def __len__(self):
        return len(self.feat)

    def __getitem__(self, i):
        return self.feat[i], self.phone[i]


class AcousticModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(5, 14, 3, padding=1)
        self.proj = nn.Linear(14, 3)

    def forward(self, feat):
        return self.proj(torch.relu(self.conv(feat.transpose(1, 2))).transpose(1, 2))


def train_epoch(model, optim, loader):
    optim.zero_grad()
    total = 0.0
    for batch_idx, (feat, phone) in enumerate(loader):
        sync = (batch_idx + 1) % ACCUM_GRAD == 0
        with contextlib.nullcontext() if sync else model.no_sync():
            loss = nn.functional.cross_entropy(model(feat).flatten(0, 1), phone.flatten())
            (loss / ACCUM_GRAD).backward()
        if (batch_idx + 1) % ACCUM_GRAD == 0:
            optim.step()
            optim.zero_grad()
        total += loss.item()
    return total / len(loader)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ds = Phones()
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    torch.manual_seed(6)
    model = DDP(AcousticModel())
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optim, loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} ppl {math.exp(loss):.3f}", flush=True)
    dist.destroy_process_group()
