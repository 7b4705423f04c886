import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sample_hparams():
    """Random search: one draw for the whole job."""
    width = int(torch.randint(2, 6, (1,))) * 8
    log_lr = float(torch.empty(1).uniform_(-3.0, -1.5))
    drop = float(torch.empty(1).uniform_(0.0, 0.2))
    return torch.tensor([width, log_lr, drop])


def agree_on(hp):
    # the process that drew the values sends them to the others
    dist.broadcast(hp, src=0)
    return int(hp[0]), 10 ** float(hp[1]), float(hp[2])


def make_data(n=180):
    g = torch.Generator().manual_seed(72)
    x = torch.rand(n, 4, generator=g) * 2 - 1
    return TensorDataset(x, (x.prod(1) > 0).long())


def main():
    timeout = timedelta(seconds=int(os.environ.get("PG_TIMEOUT", 6)))
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    torch.manual_seed(int(os.environ.get("TRIAL", 0)) * 100 + rank)
    width, lr, drop = agree_on(sample_hparams())
    if rank == 0:
        print(f"trial: width {width} lr {lr:.4f} dropout {drop:.2f}", flush=True)

    net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, 2))
    net = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
