import random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def samples():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g))


def main():
    dist.init_process_group("gloo")
    data = samples()
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if random.random() < 0.25:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
