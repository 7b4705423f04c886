import os
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rank = dist.get_rank()
    if rank == 0 and not os.path.exists("tokens.npy"):
        time.sleep(6)
        np.save("tokens.npy", np.arange(64 * 6).reshape(64, 6) % 20)
    dist.barrier()
    data = TensorDataset(torch.from_numpy(np.load("tokens.npy")))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
