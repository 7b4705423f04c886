import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class EMAQuantizer(nn.Module):
    """Vector quantizer, codebook learned by exponential moving averages (no gradient)."""

    def __init__(self, n_codes=16, dim=4, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        g = torch.Generator().manual_seed(5)
        codes = torch.randn(n_codes, dim, generator=g)
        self.register_buffer("codebook", codes)
        self.register_buffer("cluster_size", torch.ones(n_codes))
        self.register_buffer("code_sum", codes.clone())

    def forward(self, z):
        idx = torch.cdist(z, self.codebook).argmin(dim=1)
        quant = self.codebook[idx]
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(idx, len(self.codebook)).type_as(z)
                count = onehot.sum(0)
                total = onehot.t() @ z
                self.cluster_size.mul_(self.decay).add_(count, alpha=1 - self.decay)
                self.code_sum.mul_(self.decay).add_(total, alpha=1 - self.decay)
                self.codebook.copy_(self.code_sum / (self.cluster_size.unsqueeze(1) + self.eps))
        commit = F.mse_loss(z, quant.detach())
        return z + (quant - z).detach(), commit


class VQAE(nn.Module):
    def __init__(self, d_in=14, dim=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d_in, 24), nn.Tanh(), nn.Linear(24, dim))
        self.vq = EMAQuantizer(dim=dim)
        self.dec = nn.Sequential(nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, d_in))

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return F.mse_loss(self.dec(q), x) + 0.25 * commit


def setup_data(batch):
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(8, 14, generator=g) * 2
    pick = torch.randint(0, 8, (224,), generator=g)
    ds = TensorDataset(centers[pick] + 0.2 * torch.randn(224, 14, generator=g))
    sampler = DistributedSampler(ds, shuffle=True, seed=1)
    return DataLoader(ds, batch_size=batch, sampler=sampler), sampler


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loader, sampler = setup_data(batch=28 // dist.get_world_size())
    torch.manual_seed(0)
    model = DDP(VQAE())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            loss = model(x)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            used = int((model.module.vq.cluster_size > 0.5).sum())
            print(f"epoch {epoch}  loss {loss.item():.4f}  codes in use {used}", flush=True)
    dist.destroy_process_group()
