import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_table(seed, n):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = x[:, :1] * x[:, 1:2] + 0.3 * torch.randn(n, 1, generator=g)
    y[1::2] += 1.5 * torch.randn(n // 2, 1, generator=g)  # every second sensor is bad
    return TensorDataset(x, y)


class Engine:
    def __init__(self, net, lr):
        self.net = net
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0.02)

    def train(self, loader):
        self.net.train()
        for x, y in loader:
            self.optimizer.zero_grad()
            self.criterion(self.net(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, loader):
        self.net.eval()
        sq, n = torch.zeros(()), torch.zeros(())
        for x, y in loader:
            sq += (self.net.module(x) - y).square().sum()
            n += len(y)
        dist.all_reduce(sq)
        dist.all_reduce(n)
        return (sq / n).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set, val_set = load_table(0, 192), load_table(1, 64)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))
    torch.manual_seed(5)
    engine = Engine(DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))), lr=0.1)
    for epoch in range(6):
        train_sampler.set_epoch(epoch)
        engine.train(train_loader)
        val = engine.evaluate(val_loader)
        engine.scheduler.step(val)
        lr = engine.optimizer.param_groups[0]["lr"]
        if rank == 0:
            print(f"epoch {epoch}: val {val:.4f} next lr {lr:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
