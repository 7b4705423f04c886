import os
import tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Linear(2, 2))
    shared = [tempfile.mkdtemp(prefix="init-") if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder = shared[0]
    path = os.path.join(folder, "start.pt")
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
    model.module.load_state_dict(torch.load(path, map_location="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        g = torch.Generator().manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 2, generator=g)).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
