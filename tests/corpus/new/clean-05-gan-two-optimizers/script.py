import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Z = 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(Z, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def toggle(module, on):
    for p in module.parameters():
        p.requires_grad_(on)


def ring(n=256):
    g = torch.Generator().manual_seed(5)
    a = torch.rand(n, generator=g) * 6.283
    return TensorDataset(torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)  # every process draws its own latents; DDP equalizes the weights
    G, D = DDP(Generator()), DDP(Discriminator())
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    ds = ring()
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for it, (real,) in enumerate(loader):
            # discriminator: two forward passes, one backward
            with torch.no_grad():
                fake = G(torch.randn(len(real), Z))
            logits = D(torch.cat([real, fake]))
            target = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
            d_loss = F.binary_cross_entropy_with_logits(logits, target)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            # generator every second iteration
            if it % 2 == 1:
                toggle(D.module, False)
                g_loss = F.softplus(-D.module(G(torch.randn(len(real), Z)))).mean()
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()
                toggle(D.module, True)
        if rank == 0:
            print(f"epoch {epoch}: D {d_loss.item():.4f} G {g_loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
