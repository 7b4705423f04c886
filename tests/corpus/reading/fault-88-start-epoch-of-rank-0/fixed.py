import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "state.pt"


def resume(model, optimizer, rank):
    start = 0
    if os.path.exists(CKPT):
        saved = torch.load(CKPT, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    return start


def run(epochs):
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start = resume(net, optimizer, rank)
    model = DDP(net)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).pow(2).mean().backward()
            optimizer.step()
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, CKPT)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(2)
    run(4)
    dist.destroy_process_group()
