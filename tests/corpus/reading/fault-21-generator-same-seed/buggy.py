import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 1234


def diffuse(x, generator):
    t = torch.rand(x.shape[0], 1, generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    return (1 - t) * x + t * noise, t, noise


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(64, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            noisy, t, noise = diffuse(x, generator)
            loss = (model(torch.cat([noisy, t], 1)) - noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
