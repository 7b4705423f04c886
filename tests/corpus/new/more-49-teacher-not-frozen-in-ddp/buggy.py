import copy
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class BYOL(nn.Module):
    """Online and target network in one module."""

    def __init__(self, d=10, e=6, tau=0.99):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, e))
        self.predictor = nn.Linear(e, e)
        self.target = copy.deepcopy(self.online)
        self.tau = tau

    def forward(self, v1, v2):
        p = F.normalize(self.predictor(self.online(v1)), dim=-1)
        with torch.no_grad():
            z = F.normalize(self.target(v2), dim=-1)
        return 2 - 2 * (p * z).sum(-1).mean()

    @torch.no_grad()
    def update_target(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(o, 1 - self.tau)


def views(n=128):
    g = torch.Generator().manual_seed(67)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x + 0.1 * torch.randn(n, 10, generator=g), x + 0.1 * torch.randn(n, 10, generator=g))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    torch.manual_seed(0)
    learner = DDP(BYOL())
    opt = torch.optim.SGD([*learner.module.online.parameters(), *learner.module.predictor.parameters()], lr=0.1)
    ds = views()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for v1, v2 in loader:
            loss = learner(v1, v2)
            opt.zero_grad()
            loss.backward()
            opt.step()
            learner.module.update_target()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
