import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIZES = (8, 12, 16)


class FullyConv(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.f(x).mean((2, 3)))


class MultiScale:
    """Image size of a step. All processes must agree, so the stream has the same seed everywhere."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, img):
        size = self.rng.choice(SIZES)
        return F.interpolate(img, size=(size, size), mode="bilinear", align_corners=False)


def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(16)
    img = torch.rand(128, 3, 16, 16, generator=g)
    ds = TensorDataset(img, (img.mean((1, 2, 3)) * 400).long() % 4)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(FullyConv())
    torch.manual_seed(100 + rank)  # from here on: noise of this process
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    resize = MultiScale(seed=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        shapes = set()
        for x, y in loader:
            x = resize(x)
            x = x + 0.02 * torch.randn_like(x)
            if torch.rand(()) < 0.5:  # flip or not is a private decision
                x = x.flip(-1)
            shapes.add(x.shape[-1])
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} sizes {sorted(shapes)} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
