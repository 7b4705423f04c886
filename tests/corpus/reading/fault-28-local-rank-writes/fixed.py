import json
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 3, generator=g), torch.randn(32, 1, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "shared/last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
