import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validation_loss(model, loader):
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            sums[0] += (model.module(x) - y).pow(2).sum()
            sums[1] += y.numel()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(3)
    x = torch.randn(160, 6, generator=g)
    y = x[:, :1] + 0.5 * torch.randn(160, 1, generator=g)
    train, val = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 10, sampler=sampler)
    val_loader = DataLoader(val, 10, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best, bad = float("inf"), 0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(bx), by).backward()
            opt.step()
        loss = validation_loss(model, val_loader)
        if loss < best - 1e-3:
            best, bad = loss, 0
        else:
            bad += 1
        if bad >= 2:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
