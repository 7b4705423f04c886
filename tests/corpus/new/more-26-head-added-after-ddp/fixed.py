import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MultiHead(nn.Module):
    """Shared trunk, one classifier per task; tasks arrive one after the other."""

    def __init__(self, d_in=10, width=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, width), nn.ReLU())
        self.heads = nn.ModuleDict()
        self.width = width

    def add_task(self, name, n_classes):
        self.heads[name] = nn.Linear(self.width, n_classes)

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def task_data(k, n=96):
    g = torch.Generator().manual_seed(100 + k)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, k] > 0).long() + (x[:, k + 1] > 1).long())


def learn(net, task, k, args):
    ds = task_data(k)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=args.bs, sampler=sampler)
    params = list(net.module.trunk.parameters()) + list(net.module.heads[task].parameters())
    opt = torch.optim.SGD(params, lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(net(x, task), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MultiHead()
    model.add_task("species", 3)
    net = DDP(model, find_unused_parameters=True)
    first = learn(net, "species", 0, args)
    model.add_task("habitat", 3)
    del net
    net = DDP(model, find_unused_parameters=True)
    second = learn(net, "habitat", 2, args)
    if dist.get_rank() == 0:
        print(f"species {first:.4f}, habitat {second:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
