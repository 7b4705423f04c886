import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def class_weights(loader, classes):
    labels = torch.cat([label for _, label in loader])
    counts = torch.bincount(labels, minlength=classes).float()
    dist.all_reduce(counts)
    return counts.sum() / (counts.clamp(min=1) * len(counts))


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=g)
    y = torch.zeros(64, dtype=torch.long)
    y[1::2] = torch.randint(0, 3, (32,), generator=g)
    y[1] = 2
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    weights = class_weights(loader, 3)
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(bx), by, weight=weights).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
