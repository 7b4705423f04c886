import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class NoisySignals(Dataset):
    def __init__(self, n):
        t = torch.linspace(0, 3, 24)
        self.clean = torch.stack([torch.sin(t * (1 + i / n)) for i in range(n)])

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        gain = 1 + 0.1 * np.random.randn()
        noise = torch.from_numpy(np.random.randn(24)).float()
        return gain * self.clean[i] + 0.2 * noise, self.clean[i]


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def run(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = NoisySignals(args.samples)
    sampler = DistributedSampler(data, seed=args.seed)
    g = torch.Generator()
    g.manual_seed(args.seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, worker_init_fn=seed_worker, generator=g)
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(model(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{epoch=} {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--samples", type=int, default=64)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--seed", type=int, default=17)
    run(p.parse_args())
