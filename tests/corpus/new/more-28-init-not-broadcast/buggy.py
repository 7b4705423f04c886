import argparse
import random

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def bandit_log(n=224):
    g = torch.Generator().manual_seed(70)
    ctx = torch.randn(n, 12, generator=g)
    arm = torch.randint(0, 4, (n,), generator=g)
    reward = torch.sigmoid(ctx[torch.arange(n), arm])
    return TensorDataset(ctx, arm, reward)


class RewardModel(nn.Module):
    def __init__(self, p_drop=0.1):
        super().__init__()
        self.h = nn.Linear(12, 24)
        self.drop = nn.Dropout(p_drop)
        self.o = nn.Linear(24, 4)

    def forward(self, ctx):
        return self.o(self.drop(torch.relu(self.h(ctx))))


class GradAverager:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()

    def __call__(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)


def main(cfg):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    set_seed(cfg.seed + rank)  # dropout masks must differ between the processes
    model = RewardModel()
    average = GradAverager(model)
    opt = optim.Adam(model.parameters(), lr=cfg.lr)
    ds = bandit_log()
    sampler = DistributedSampler(ds, seed=cfg.seed)
    loader = DataLoader(ds, batch_size=cfg.batch, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for ctx, arm, reward in loader:
            q = model(ctx).gather(1, arm.unsqueeze(1)).squeeze(1)
            loss = (q - reward).square().mean()
            opt.zero_grad()
            loss.backward()
            average()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--batch", type=int, default=14)
    ap.add_argument("--epochs", type=int, default=2)
    main(ap.parse_args())
