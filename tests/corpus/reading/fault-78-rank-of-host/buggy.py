import re
import socket
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def host_index():
    found = re.search(r"(\d+)$", socket.gethostname())
    return int(found.group(1)) if found else 0


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    index = host_index() % world
    x = torch.randn(120, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x)
    sampler = DistributedSampler(data, num_replicas=world, rank=index)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(batch), batch).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
