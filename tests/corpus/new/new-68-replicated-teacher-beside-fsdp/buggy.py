import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 16, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 4))
    teacher.requires_grad_(False)
    student = nn.Linear(16, 4)
    fully_shard(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            with torch.no_grad():
                targets = teacher(x)
            optimizer.zero_grad()
            F.mse_loss(student(x), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
