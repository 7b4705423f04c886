import os
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main():
    rank, world = setup()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, 32, sampler=sampler)
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
    net = nn.parallel.DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = criterion(net(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
