import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ConvBN(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout, momentum=0.3), nn.ReLU(inplace=True))


class TinyResNet(nn.Module):
    def __init__(self, ch=8, classes=4):
        super().__init__()
        self.stem = ConvBN(3, ch)
        self.body = ConvBN(ch, ch)
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(x.mean((2, 3)))


def satellite(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.rand(n, 3, 8, 8, generator=g) + 0.15 * y.view(-1, 1, 1, 1)
    return TensorDataset(x * (1 + (torch.arange(n) % 2).view(-1, 1, 1, 1)), y)


@torch.no_grad()
def share_buffers(net, world):
    """One set of running statistics for everybody: the mean over the ranks."""
    for buf in net.buffers():
        if buf.is_floating_point():
            dist.all_reduce(buf)
            buf /= world


@torch.no_grad()
def evaluate(net, ds, rank, world):
    net.eval()
    tally = torch.zeros(2)
    for x, y in DataLoader(Subset(ds, range(rank, len(ds), world)), batch_size=16):
        tally += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(tally)
    net.train()
    return (tally[0] / tally[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_ds, test_ds = satellite(128, 0), satellite(64, 1)
    sampler = DistributedSampler(train_ds, shuffle=False)
    loader = DataLoader(train_ds, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(TinyResNet(), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        share_buffers(model.module, world)
        acc = evaluate(model.module, test_ds, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} test accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "resnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
