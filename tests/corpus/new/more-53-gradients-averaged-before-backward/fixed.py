import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pendulum(Dataset):
    def __init__(self, n=192, dt=0.05):
        g = torch.Generator().manual_seed(84)
        self.s = torch.rand(n, 2, generator=g) * 4 - 2
        th, om = self.s.unbind(1)
        self.nxt = torch.stack([th + dt * om, om - dt * 9.81 * th.sin()], 1)

    def __len__(self):
        return len(self.s)

    def __getitem__(self, i):
        return self.s[i], self.nxt[i]


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, s):
        return s + self.f(s)


def average_gradients(module):
    world = dist.get_world_size()
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.mul_(1.0 / world)


def fit(model, loader, sampler, epochs, lr):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for s, nxt in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(s), nxt)
            loss.backward()
            average_gradients(model)
            opt.step()
            running += loss.item()
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: {running / len(loader):.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)  # the same start everywhere, no wrapper needed
    model = Dynamics()
    data = Pendulum()
    sampler = DistributedSampler(data, shuffle=True)
    fit(model, DataLoader(data, batch_size=24, sampler=sampler), sampler, epochs=3, lr=1e-2)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "dynamics.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
