from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Brain:
    def __init__(self):
        self.modules = {
            "encoder": DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh())),
            "loss": nn.MSELoss(),
            "decoder": DDP(nn.Linear(20, 3)),
        }
        params = [p for m in self.modules.values() for p in m.parameters()]
        self.optimizer = torch.optim.Adagrad(params, lr=0.03)

    @contextmanager
    def no_sync(self, use=True):
        wrapped = [m for m in self.modules.values() if isinstance(m, DDP)]
        if use:
            for module in wrapped:
                module.require_backward_grad_sync = False
        yield
        for module in self.modules.values():
            if not isinstance(module, DDP):
                continue
            module.require_backward_grad_sync = True

    def loss(self, x, y):
        return self.modules["loss"](self.modules["decoder"](self.modules["encoder"](x)), y)

    def fit_epoch(self, loader, accumulate=2):
        for step, (x, y) in enumerate(loader, 1):
            last = step % accumulate == 0
            with self.no_sync(not last):
                (self.loss(x, y) / accumulate).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(7)
    x = torch.randn(160, 10, generator=g)
    data = TensorDataset(x, x[:, :3].sin())
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    brain = Brain()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        brain.fit_epoch(loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
