import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def gather_keys(keys):
    parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, keys)
    return torch.cat(parts)


class Queue:
    def __init__(self, size, width):
        self.keys = F.normalize(torch.randn(size, width, generator=torch.Generator().manual_seed(0)), dim=1)
        self.at = 0

    def push(self, keys):
        rows = (torch.arange(len(keys)) + self.at) % len(self.keys)
        self.keys[rows] = keys
        self.at = int(self.at + len(keys)) % len(self.keys)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    query = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    query = DDP(query)
    queue = Queue(64, 8)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(128, 10, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            q = F.normalize(query(x + 0.05 * x.roll(1, 1)), dim=1)
            with torch.no_grad():
                for k, p in zip(key.parameters(), query.module.parameters()):
                    k.lerp_(p, 0.05)
                k = F.normalize(key(x), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.keys.T.clone()], dim=1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.push(gather_keys(k))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
