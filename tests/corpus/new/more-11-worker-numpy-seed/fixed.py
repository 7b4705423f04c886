import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

RANK = int(os.environ.get("RANK", 0))


class AugmentedPatches(Dataset):
    def __init__(self, n=128, size=10, crop=6):
        self.imgs = np.random.RandomState(0).rand(n, 2, size, size).astype("float32")
        self.crop = crop

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, i):
        img = self.imgs[i]
        top, left = np.random.randint(0, img.shape[1] - self.crop + 1, size=2)
        patch = img[:, top : top + self.crop, left : left + self.crop].copy()
        patch += np.random.normal(0, 0.05, patch.shape).astype("float32")
        target = np.float32(img.mean())
        return torch.from_numpy(patch), torch.tensor(target)


def init_worker(worker_id):
    # reproducible augmentation, another stream for every worker of every rank and epoch
    np.random.seed((torch.initial_seed() + 7919 * RANK) % 2**32)


def build(args):
    ds = AugmentedPatches()
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, worker_init_fn=init_worker)
    return loader, sampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=8)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    loader, sampler = build(args)
    torch.manual_seed(9)
    net = DDP(nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for patch, target in loader:
            loss = nn.functional.l1_loss(net(patch).squeeze(1), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if RANK == 0:
            print(f"epoch {epoch} l1 {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
