import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningMoments(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x):
        n = torch.tensor(float(len(x)))
        total, square = x.sum(0), (x * x).sum(0)
        for part in (n, total, square):
            dist.all_reduce(part)
        mean = total / n
        var = square / n - mean * mean
        delta = mean - self.mean
        count = self.count + n
        self.mean += delta * n / count
        m2 = self.var * self.count + var * n + delta**2 * self.count * n / count
        self.var.copy_(m2 / count)
        self.count.copy_(count)

    def forward(self, x):
        return (x - self.mean) / (self.var + 1e-6).sqrt()


def episodes(n):
    g = torch.Generator().manual_seed(3)
    obs = torch.randn(n, 6, generator=g) * torch.tensor([1.0, 4, 0.2, 9, 2, 1]) + 3
    return TensorDataset(obs, (obs[:, :2].sum(1, keepdim=True) / 5).tanh())


def main():
    dist.init_process_group("gloo")
    data = episodes(192)
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    torch.manual_seed(0)
    normalize = RunningMoments(6)
    policy = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for obs, target in loader:
            normalize.update(obs)
            loss = nn.functional.mse_loss(policy(normalize(obs)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, {int(normalize.count)} observations", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
