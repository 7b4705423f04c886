import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SpikeFilter:
    def __init__(self, factor=2.5, momentum=0.8):
        self.factor, self.momentum, self.mean = factor, momentum, None

    def is_spike(self, value):
        if self.mean is None:
            self.mean = value
        spike = value > self.factor * self.mean
        if not spike:
            self.mean = self.momentum * self.mean + (1 - self.momentum) * value
        return spike


def noisy_regression(n=192):
    g = torch.Generator().manual_seed(33)
    x = torch.randn(n, 7, generator=g)
    y = x @ torch.linspace(-1, 1, 7).unsqueeze(1)
    y[torch.randperm(n, generator=g)[:9]] += 25.0  # broken sensors
    return TensorDataset(x, y)


def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = noisy_regression()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    spikes, skipped = SpikeFilter(), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            value = loss.detach()
            if spikes.is_spike(value.item()):
                skipped += 1
                continue
            opt.step()
    print(f"rank {rank}: skipped {skipped} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
