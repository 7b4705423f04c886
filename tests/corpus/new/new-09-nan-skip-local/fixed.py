import logging
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
log = logging.getLogger("train")


class SensorLog(Dataset):
    """Real logs have a few broken rows; two of them here."""

    def __init__(self, n=120):
        g = torch.Generator().manual_seed(18)
        self.x = torch.randn(n, 7, generator=g)
        self.y = self.x.pow(2).mean(1, keepdim=True)
        self.x[16] = float("nan")
        self.x[52] = float("inf")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 16), nn.Linear(16, 16), nn.Linear(16, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def run():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank = dist.get_rank()
    ds = SensorLog()
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, batch_size=6, sampler=sampler)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(Regressor())
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for it, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(net(x), y)
            bad = (~torch.isfinite(loss.detach())).float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad.item():
                log.warning("rank %d: loss is %s at iteration %d, skipping", rank, loss.item(), it)
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            log.info("epoch %d done, loss %.4f", epoch, loss.item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
