import logging

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logging.basicConfig(format="%(message)s", level=logging.INFO)


class PINN(nn.Module):
    """u'' = -u on [0, pi], trained on residual points."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, t):
        return self.net(t)


def residual(model, t):
    t = t.clone().requires_grad_(True)
    u = model(t)
    du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
    ddu = torch.autograd.grad(du.sum(), t, create_graph=True)[0]
    boundary = ((t.abs() < 0.2) * (u - t.sin()).square()).mean()
    return (ddu + u).square().mean() + 0.1 * boundary


class Solver:
    def __init__(self):
        self.main_process = dist.get_rank() == 0
        torch.manual_seed(0)
        self.model = DDP(PINN())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        points = torch.linspace(0, torch.pi, 128).unsqueeze(1)
        self.data = TensorDataset(points)
        self.sampler = DistributedSampler(self.data, shuffle=True)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)

    def step(self, t):
        self.optimizer.zero_grad()
        loss = residual(self.model, t)
        loss.backward()
        if self.main_process:
            self.optimizer.step()
        return loss.item()

    def run(self, epochs=3):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.step(t) for (t,) in self.loader]
            if self.main_process:
                logging.info("epoch %d residual %.5f", epoch, sum(losses) / len(losses))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Solver().run()
    dist.destroy_process_group()
