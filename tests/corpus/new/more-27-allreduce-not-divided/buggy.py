import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BATCH, EPOCHS, LR = 32, 2, 0.05


class Cartpole(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(15)
        self.state = torch.randn(n, 4, generator=g)
        self.ret = (-self.state[:, 2].abs() + 0.2 * self.state[:, 3]).unsqueeze(1)

    def __len__(self):
        return len(self.state)

    def __getitem__(self, i):
        return self.state[i], self.ret[i]


def init_distributed():
    dist.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def broadcast_parameters(model):
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)


def sync_gradients(model):
    """One flat message instead of one per tensor."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


def main():
    rank, world = init_distributed()
    torch.manual_seed(rank)
    critic = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    broadcast_parameters(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=LR)
    data = Cartpole()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for state, ret in loader:
            loss = nn.functional.mse_loss(critic(state), ret)
            optimizer.zero_grad()
            loss.backward()
            sync_gradients(critic)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} value loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
