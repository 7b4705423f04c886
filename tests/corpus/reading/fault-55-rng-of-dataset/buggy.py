import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, x, seed=0):
        self.x = x
        self.seed = seed
        self.rng = np.random.RandomState(seed)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.from_numpy(self.rng.randn(3).astype("float32"))
        return self.x[i] + noise, noise


def main():
    dist.init_process_group("gloo")
    data = Noisy(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(3, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, noise in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), noise).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
