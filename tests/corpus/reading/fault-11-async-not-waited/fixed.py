import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Meter:
    def __init__(self):
        self.values = torch.zeros(2)

    def update(self, loss, n):
        self.values[0] += loss.detach() * n
        self.values[1] += n

    def compute(self):
        totals = self.values.clone()
        work = dist.all_reduce(totals, async_op=True)
        work.wait()
        return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        meter = Meter()
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss, len(x))
        value = meter.compute()
        if dist.get_rank() == 0:
            print(epoch, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
