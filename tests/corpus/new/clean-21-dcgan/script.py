import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def regression(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set = regression(64)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)))
    discriminator = DDP(mlp(8))
    opt_g = torch.optim.Adam(generator.parameters(), 1e-3)
    opt_d = torch.optim.Adam(discriminator.parameters(), 1e-3)
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            discriminator.zero_grad()
            criterion(discriminator(x), torch.ones(len(x), 1)).backward()
            fake = generator(torch.randn(len(x), 4))
            criterion(discriminator(fake.detach()), torch.zeros(len(x), 1)).backward()
            opt_d.step()
            generator.zero_grad()
            criterion(discriminator(fake), torch.ones(len(x), 1)).backward()
            opt_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
