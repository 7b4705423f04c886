import collections
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SmoothedValue:
    def __init__(self, window=5):
        self.window = collections.deque(maxlen=window)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.window.append(value)
        self.total += value * n
        self.count += n

    def synchronize(self):
        t = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(t)
        self.total, self.count = t[0].item(), int(t[1])

    @property
    def mean(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self, main_process):
        self.main_process = main_process
        self.meters = collections.defaultdict(SmoothedValue)

    def update(self, n, **values):
        for k, v in values.items():
            self.meters[k].update(float(v), n)

    def summary(self, header):
        if not self.main_process:
            return
        for meter in self.meters.values():
            meter.synchronize()
        print(header, " ".join(f"{k}: {m.mean:.4f}" for k, m in self.meters.items()), flush=True)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(36)
    x = torch.randn(140, 5, 5, generator=g)
    ds = TensorDataset(x, x.flatten(1).amax(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=14, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(25, 30), nn.ReLU(), nn.Linear(30, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        log = MetricLogger(main_process=rank == 0)
        for xb, yb in loader:
            out = model(xb).squeeze(1)
            loss = F.mse_loss(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            log.update(len(yb), loss=loss.item(), mae=(out - yb).abs().mean().item())
        log.summary(f"epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
