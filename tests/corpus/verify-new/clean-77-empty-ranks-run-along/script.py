import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

PARTS = [13, 40, 22, 9, 31]


class Parts(IterableDataset):
    """Files of different lengths; every rank reads each world-th one."""

    def __init__(self, rank, world):
        self.mine = range(rank, len(PARTS), world)

    def __iter__(self):
        for part in self.mine:
            g = torch.Generator().manual_seed(part)
            for _ in range(PARTS[part]):
                x = torch.randn(4, generator=g)
                yield x, x.norm().reshape(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Parts(rank, world), batch_size=8)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        stream, batch, steps = iter(loader), None, 0
        while True:
            following = next(stream, None)
            batch = batch if following is None else following
            count = torch.tensor(0.0 if following is None else float(len(following[0])))
            everywhere = count.clone()
            dist.all_reduce(everywhere)
            if everywhere.item() == 0:
                break
            x, y = batch
            errors = (model(x) - y).square().mean(1)
            weight = 0.0 if following is None else 1.0
            loss = weight * errors.sum() * world / everywhere
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
