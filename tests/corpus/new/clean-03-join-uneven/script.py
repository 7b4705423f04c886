from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Shard(Dataset):
    """What the previous job left on this machine; the shards are not equally long."""

    def __init__(self, rank, world):
        total = 150
        cut = [round(total * (k / world) ** 0.8) for k in range(world + 1)]
        g = torch.Generator().manual_seed(64)
        x = torch.randn(total, 9, generator=g)
        self.x = x[cut[rank] : cut[rank + 1]]
        self.y = self.x.cos().prod(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(9, 21), nn.Mish(), nn.Linear(21, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Shard(rank, dist.get_world_size()), batch_size=10, shuffle=True)
    for epoch in range(2):
        n_batches, loss_sum = 0, 0.0
        with Join([model]):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                n_batches += 1
                loss_sum += loss.item()
        summary = torch.tensor([n_batches, loss_sum], dtype=torch.float64)
        dist.all_reduce(summary)
        print(f"rank {rank} epoch {epoch}: {n_batches} batches here", flush=True)
        if rank == 0:
            print(f"mean loss over {int(summary[0])} batches {summary[1] / summary[0]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
