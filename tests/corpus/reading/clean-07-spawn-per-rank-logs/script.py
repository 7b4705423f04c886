import argparse
import logging
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def seed_all(seed, rank):
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def logger_for(rank, folder):
    os.makedirs(folder, exist_ok=True)
    logger = logging.getLogger(f"train.{rank}")
    logger.addHandler(logging.FileHandler(os.path.join(folder, f"rank{rank}.log")))
    return logger


def run(rank, args):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29544", rank=rank, world_size=args.world)
    seed_all(args.seed, rank)
    logger = logger_for(rank, args.folder)
    g = torch.Generator().manual_seed(args.seed)
    x = torch.randn(64, 4, generator=g)
    data = TensorDataset(x, x[:, :1])
    sampler = DistributedSampler(data, num_replicas=args.world, rank=rank, seed=args.seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x + 0.01 * torch.randn_like(x)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        logger.info("epoch %d, %.1f s", epoch, time.time() - began)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.folder, "model.pt"))
    dist.barrier()
    state = torch.load(os.path.join(args.folder, "model.pt"), map_location="cpu")
    model.module.load_state_dict(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="runs")
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.world, join=True)
