import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Grasps(Dataset):
    """Depth patches with a success label."""

    def __init__(self, n=200, size=7):
        rng = np.random.RandomState(1234)
        self.depth = rng.rand(n, 1, size, size).astype("float32")
        self.ok = (self.depth[:, 0, 3, 3] > self.depth.mean((1, 2, 3))).astype("float32")

    def __len__(self):
        return len(self.ok)

    def __getitem__(self, i):
        return torch.from_numpy(self.depth[i]), torch.tensor(self.ok[i])


def build_sets(args):
    full = Grasps()
    n_val = int(len(full) * args.val_ratio)
    return random_split(full, [len(full) - n_val, n_val])


def validate(net, val_set):
    mine = Subset(val_set, range(dist.get_rank(), len(val_set), dist.get_world_size()))
    stats = torch.zeros(2, dtype=torch.float64)
    net.eval()
    with torch.no_grad():
        for depth, ok in DataLoader(mine, batch_size=20):
            logit = net(depth).squeeze(1)
            stats += torch.tensor([((logit > 0).float() == ok).sum().item(), len(ok)])
    net.train()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--val_ratio", type=float, default=0.2)
    p.add_argument("--epochs", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    # every process needs its own augmentation noise
    seed_all(args.seed + dist.get_rank())

    train_set, val_set = build_sets(args)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    net = DDP(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 1)))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for depth, ok in loader:
            depth = depth + 0.01 * torch.randn_like(depth)
            loss = nn.functional.binary_cross_entropy_with_logits(net(depth).squeeze(1), ok)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = validate(net.module, val_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val acc {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
