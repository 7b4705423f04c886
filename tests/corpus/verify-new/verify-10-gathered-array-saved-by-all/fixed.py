import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, d=20, z=4):
        super().__init__()
        self.encoder = nn.Linear(d, z)
        self.decoder = nn.Linear(z, d)

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


def export_embeddings(model, data, out_dir):
    rank, world = dist.get_rank(), dist.get_world_size()
    size = len(data) // world
    mine = data.tensors[0][rank * size:(rank + 1) * size]
    with torch.no_grad():
        z = model.module.encoder(mine)
    parts = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(parts, z)
    os.makedirs(out_dir, exist_ok=True)
    table = torch.cat(parts).numpy()
    if rank == 0:
        np.save(os.path.join(out_dir, "embeddings.npy"), table)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(96, 20, generator=torch.Generator().manual_seed(8)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    torch.manual_seed(2)
    model = DDP(AutoEncoder())
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(x), x).backward()
            opt.step()
    export_embeddings(model, data, "export")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
