import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    np.random.seed(17)
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 12, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            mask = torch.from_numpy(np.random.rand(*x.shape) < 0.5)
            optimizer.zero_grad()
            ((model(x * ~mask) - x)[mask] ** 2).sum().div(x.numel()).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
