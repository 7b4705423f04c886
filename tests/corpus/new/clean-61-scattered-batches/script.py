import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def dataset():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(120, 6, generator=g)
    return TensorDataset(torch.cat([x, x[:, :1].sign()], dim=1))


def batches(rank, world, epoch):
    source = None
    if rank == 0:
        generator = torch.Generator().manual_seed(epoch)
        source = iter(DataLoader(dataset(), batch_size=12, shuffle=True, generator=generator))
    while True:
        rows = next(source, None) if rank == 0 else None
        more = torch.tensor([rows is not None])
        dist.broadcast(more, src=0)
        if not more.item():
            return
        part = torch.empty(12 // world, 7)
        dist.scatter(part, list(rows[0].chunk(world)) if rank == 0 else None, src=0)
        yield part[:, :6], part[:, 6:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for x, y in batches(rank, world, epoch):
            loss = nn.functional.soft_margin_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
