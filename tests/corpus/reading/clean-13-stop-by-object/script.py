import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, limit):
        self.limit, self.best, self.bad = limit, None, 0

    def update(self, value):
        if self.best is None or value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.limit


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(144, 4, generator=g)
    train, val = TensorDataset(x[:96]), TensorDataset(x[96:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    val_loader = DataLoader(val, 16) if rank == 0 else None
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    patience = Patience(2)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for (b,) in loader:
            opt.zero_grad()
            (model(b) - b).pow(2).mean().backward()
            opt.step()
        decision = [False]
        if val_loader is not None:
            with torch.no_grad():
                losses = [(model.module(b) - b).pow(2).mean().item() for (b,) in val_loader]
            decision[0] = patience.update(sum(losses) / len(losses))
            print("validation", epoch, losses[-1])
        dist.broadcast_object_list(decision, src=0)
        if decision[0]:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
