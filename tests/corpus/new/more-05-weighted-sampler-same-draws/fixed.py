import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    """Draw with replacement from one stream common to all ranks, keep every world-th draw."""

    def __init__(self, weights, num_samples, seed=0):
        self.weights, self.num_samples, self.seed, self.epoch = weights, num_samples, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draws = torch.multinomial(self.weights, len(self) * self.world, replacement=True, generator=g)
        return iter(draws[self.rank :: self.world].tolist())


def fraud_table(n=320):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(n, 9, generator=g)
    y = (x[:, :2].sum(1) > 2.2).long()
    return x, y


def inverse_frequency(y):
    counts = torch.bincount(y, minlength=2).double()
    return (1.0 / counts)[y]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2024)
    x, y = fraud_table()
    weights = inverse_frequency(y)
    sampler = DistributedWeightedSampler(weights, num_samples=320)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)

    net = DistributedDataParallel(nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 2)))
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
    for epoch in range(2):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        pos = 0
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            pos += int(yb.sum())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, positives drawn {pos}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
