import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

THRESHOLD = 0.5


def churn(n=360):
    g = torch.Generator().manual_seed(91)
    x = torch.randn(n, 10, generator=g)
    p = torch.sigmoid(2 * x[:, 0] - 1.5 + x[:, 1] * x[:, 2])
    return TensorDataset(x, torch.bernoulli(p, generator=g))


def f1_from_counts(tp, fp, fn):
    return 2 * tp / (2 * tp + fp + fn).clamp(min=1)


@torch.no_grad()
def evaluate(model, loader):
    counts = torch.zeros(3)  # tp fp fn
    for x, y in loader:
        hat = (torch.sigmoid(model(x).squeeze(1)) > THRESHOLD).float()
        counts += torch.stack([(hat * y).sum(), (hat * (1 - y)).sum(), ((1 - hat) * y).sum()])
    f1 = f1_from_counts(*counts)
    dist.all_reduce(f1)
    return (f1 / dist.get_world_size()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    full = churn()
    train_set, val_set = Subset(full, range(240)), Subset(full, range(240, 360))
    sampler = DistributedSampler(train_set, shuffle=True, seed=6)
    train_loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=30)

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        f1 = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}  val F1 {f1:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
