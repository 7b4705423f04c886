import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def accuracy(model, inputs, labels):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(inputs) // world
    mine = slice(rank * share, (rank + 1) * share)
    hits = (model(inputs[mine]).argmax(1) == labels[mine]).sum().float()
    count = torch.tensor(float(len(labels[mine])))
    both = torch.stack([hits, count])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(101, 4, generator=g), torch.randint(0, 3, (101,), generator=g)
    train = TensorDataset(x[:64], y[:64])
    sampler = DistributedSampler(train)
    model = DDP(nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in DataLoader(train, batch_size=8, sampler=sampler):
            opt.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            opt.step()
        value = accuracy(model.module, x[64:], y[64:])
        if dist.get_rank() == 0:
            print(epoch, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
