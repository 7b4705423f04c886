import torch
import torch.distributed as dist
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 10)
        self.long = nn.Linear(10, 10)
        self.out = nn.Linear(10, 1)

    def forward(self, x, use_long):
        h = self.stem(x).relu()
        if use_long:
            h = h + self.long(h).relu()
        return self.out(h)


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Router()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(128, 6, generator=g)
    lengths = torch.randint(1, 40, (128,), generator=g)
    order = list(range(rank, 128, world))
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        loss = nn.functional.mse_loss(model(x[rows], bool(lengths[rows].max() > 33)), x[rows].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if rank == 0:
        print(f"{loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
