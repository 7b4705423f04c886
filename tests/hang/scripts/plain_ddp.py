"""Plain PyTorch: DDP with a DataLoader, without samestep."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from faults import BATCH, DEVICE, TIMEOUT, Rows, disturb, meet, num_workers, rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fault = sys.argv[1]


def main() -> None:
    meet()
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", timeout=timedelta(seconds=TIMEOUT))
    model = DistributedDataParallel(torch.nn.Linear(2, 1).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Rows(fault)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=num_workers(fault))
    for step, rows in enumerate(loader):
        disturb(fault, step)
        if fault == "rank_0":
            dist.barrier()  # waits: rank_0
        optimizer.zero_grad()
        loss = model(rows.to(DEVICE)).square().mean()
        loss.backward()  # waits
        optimizer.step()
        value = loss.item()  # waits over NCCL
    print(f"rank {rank()} is done, loss {value:.3f}")
    dist.destroy_process_group()


main()
