from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def rotate(folder, keep):
    files = sorted(folder.glob("step-*.pt"))
    for path in files[:-keep]:
        path.unlink(missing_ok=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path("checkpoints")
    folder.mkdir(exist_ok=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=g), torch.randn(64, 1, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), folder / f"step-{epoch}.pt")
        dist.barrier()
        rotate(folder, keep=1)
    dist.destroy_process_group()


main()
