import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sync_gradients(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(9, 27), nn.ReLU(), nn.Linear(27, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(31)
    x = torch.randn(144, 9, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=9, sampler=sampler)
    trainer = Trainer()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = trainer.step(bx, by)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
