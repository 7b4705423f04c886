import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def reduce_dict(values):
    if dist.get_world_size() < 2:
        return values
    names = sorted(values)
    stacked = torch.stack([values[name].detach() for name in names])
    dist.reduce(stacked, dst=0)
    if dist.get_rank() == 0:
        stacked /= dist.get_world_size()
    return dict(zip(names, stacked))


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, y):
        h = self.body(x).relu()
        return {"first": (self.first(h) - y).pow(2).mean(), "second": (self.second(h) + y).abs().mean()}


def main():
    dist.init_process_group("gloo")
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(TwoTasks())
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, (bx, by) in enumerate(loader):
            losses = model(bx, by)
            total = sum(losses.values())
            logged = reduce_dict(losses)
            if not torch.isfinite(sum(logged.values())) and dist.get_rank() == 0:
                print("loss is not finite", logged)
            opt.zero_grad()
            total.backward()
            opt.step()
            if index % 3 == 0 and dist.get_rank() == 0:
                print(epoch, index, {name: round(value.item(), 4) for name, value in logged.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
