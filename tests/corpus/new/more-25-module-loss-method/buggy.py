import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Flow(nn.Module):
    """Two affine coupling layers on 6-dimensional points."""

    def __init__(self, dim=6, hidden=24):
        super().__init__()
        self.half = dim // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(self.half, hidden), nn.Tanh(), nn.Linear(hidden, dim)) for _ in range(2)
        )

    def forward(self, x):
        logdet = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, dim=-1)
            shift, log_scale = net(a).chunk(2, dim=-1)
            log_scale = torch.tanh(log_scale)
            x = torch.cat([b * log_scale.exp() + shift, a], dim=-1)
            logdet = logdet + log_scale.sum(-1)
        return x, logdet

    def nll(self, x):
        z, logdet = self(x)
        return (0.5 * z.square().sum(-1) - logdet).mean()


def nll_of(model, x):
    z, logdet = model(x)
    return (0.5 * z.square().sum(-1) - logdet).mean()


def make_loader(batch_size):
    g = torch.Generator().manual_seed(2)
    mix = torch.randn(6, 6, generator=g)
    ds = TensorDataset(torch.randn(200, 6, generator=g) @ mix)
    sampler = DistributedSampler(ds, shuffle=True)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler), sampler


def main():
    dist.init_process_group("gloo")
    loader, sampler = make_loader(20)
    torch.manual_seed(0)
    model = DDP(Flow())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model.module.nll(x)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: nll {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
