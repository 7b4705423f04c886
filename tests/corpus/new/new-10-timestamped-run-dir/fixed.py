import json
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"epochs": 2, "lr": 0.02, "batch": 10, "name": "spirals"}


def make_run_dir(cfg):
    stamp = [datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")]
    dist.broadcast_object_list(stamp, src=0)
    run_dir = Path("outputs") / f"{stamp[0]}_{cfg['name']}"
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def spirals(n=160):
    g = torch.Generator().manual_seed(2)
    r = torch.rand(n, generator=g) * 3
    cls = torch.randint(0, 2, (n,), generator=g)
    ang = 2.5 * r + 3.14159 * cls
    return TensorDataset(torch.stack([r * ang.cos(), r * ang.sin()], 1), cls)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.run_dir = make_run_dir(cfg)
        self.data = spirals()
        self.sampler = DistributedSampler(self.data, shuffle=True)
        self.loader = DataLoader(self.data, batch_size=cfg["batch"], sampler=self.sampler)
        torch.manual_seed(0)
        self.net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg["lr"])

    def save(self, epoch):
        # every process keeps its own random state; rank 0 adds weights and config
        torch.save(torch.get_rng_state(), self.run_dir / f"rng_rank{self.rank}.pt")
        if self.rank == 0:
            torch.save({"net": self.net.module.state_dict(), "epoch": epoch}, self.run_dir / "weights.pt")
            (self.run_dir / "config.json").write_text(json.dumps(self.cfg))
        dist.barrier()

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = F.cross_entropy(self.net(x), y)
                loss.backward()
                self.opt.step()
            self.save(epoch)
        if self.rank == 0:
            n = len(list(self.run_dir.glob("rng_rank*.pt")))
            print(f"saved {n} of {dist.get_world_size()} random states to the run directory", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(CONFIG).fit()
    dist.destroy_process_group()
