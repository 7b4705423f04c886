import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def load_features(path, rank):
    if rank not in (-1, 0):
        dist.barrier()
    if os.path.exists(path):
        features = torch.load(path)
    else:
        features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        if rank in (-1, 0):
            torch.save(features, path)
    if rank == 0:
        dist.barrier()
    return features


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    features = load_features("features.pt", rank)
    mine = features[rank :: dist.get_world_size()]
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = (model(mine) - mine).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
