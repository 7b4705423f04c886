import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def is_main():
    return dist.get_rank() == 0


class Autoencoder(nn.Module):
    def __init__(self, d=16, z=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 10), nn.ReLU(), nn.Linear(10, z))
        self.decoder = nn.Sequential(nn.Linear(z, 10), nn.ReLU(), nn.Linear(10, d))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def save(model, folder, epoch):
    if is_main():
        os.makedirs(folder, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(folder, f"ae_{epoch}.pt"))
    # make sure that the file is complete before anybody goes on
    dist.barrier()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(3, 16, generator=g)
    data = TensorDataset(torch.randn(160, 3, generator=g) @ basis)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(1)
    model = DDP(Autoencoder())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = F.mse_loss(model(x), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if is_main():
            print(f"epoch {epoch} reconstruction {loss.item():.4f}", flush=True)
        save(model, "checkpoints", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
