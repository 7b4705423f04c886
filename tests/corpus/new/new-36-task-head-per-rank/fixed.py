import random
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = {"sentiment": 2, "topic": 5, "stars": 1}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(32, n) for name, n in TASKS.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def objective(task, out, x):
    if task == "stars":
        return nn.functional.mse_loss(out.squeeze(1), x.sum(1))
    return nn.functional.cross_entropy(out, x[:, : TASKS[task]].argmax(1))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(MultiTask(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    rng = random.Random(rank)
    g = torch.Generator().manual_seed(50 + rank)
    for step in range(16):
        task = rng.choice(sorted(TASKS))
        x = torch.randn(8, 12, generator=g)
        loss = objective(task, model(x, task), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 8 == 0:
            print(step, task, f"{loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
