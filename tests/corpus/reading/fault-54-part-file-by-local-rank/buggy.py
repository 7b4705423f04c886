import os
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    if rank == 0:
        for i in range(dist.get_world_size()):
            np.save(f"part-{i}.npy", np.random.RandomState(i).randn(32, 3).astype("float32"))
    dist.barrier()
    part = torch.from_numpy(np.load(f"part-{local_rank}.npy"))
    model = DDP(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (x,) in DataLoader(TensorDataset(part), batch_size=8, shuffle=True):
            opt.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
