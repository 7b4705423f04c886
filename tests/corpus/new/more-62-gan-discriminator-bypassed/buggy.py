import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    discriminator = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
    data = make_data(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), 4))
            optimizer_d.zero_grad()
            scores = discriminator.module(torch.cat([real, fake.detach()]))
            F.binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros])).backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            discriminator.requires_grad_(False)
            F.binary_cross_entropy_with_logits(discriminator.module(fake), ones).backward()
            discriminator.requires_grad_(True)
            optimizer_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
