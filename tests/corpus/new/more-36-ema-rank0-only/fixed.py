import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ModelEma:
    def __init__(self, model, decay=0.8):
        self.decay = decay
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def wafer_maps(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 8, 8, generator=g)
    y = torch.randint(0, 3, (n,), generator=g)
    for i in range(n):
        x[i, 0, :, y[i] * 2 : y[i] * 2 + 2] += 0.5
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(net, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    tally = torch.zeros(2)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=20):
        tally += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set, val_set = wafer_maps(160, 0), wafer_maps(80, 1)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    model = DDP(net)
    ema = ModelEma(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            ema.update(net)
        acc = evaluate(ema.module, val_set)
        if rank == 0:
            print(f"epoch {epoch} EMA accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
