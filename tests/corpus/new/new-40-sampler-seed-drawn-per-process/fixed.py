import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def init_random_seed(seed=None):
    if seed is None:
        seed = int(np.random.default_rng().integers(2**31))
    box = torch.tensor([seed])
    dist.broadcast(box, src=0)
    seed = int(box)
    return seed


def build_loader(dataset, seed):
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed)
    return DataLoader(dataset, batch_size=8, sampler=sampler), sampler


def main():
    dist.init_process_group("gloo")
    seed = init_random_seed()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=g)
    loader, sampler = build_loader(TensorDataset(x, (x[:, :2].sum(1) > 0).float()), seed)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(bx).squeeze(1), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
