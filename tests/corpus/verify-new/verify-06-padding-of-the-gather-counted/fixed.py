import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def gaussians(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    means = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, -1.0]])
    return TensorDataset(means[y] + 0.9 * torch.randn(n, 2, generator=g), y)


def gather_padded(t, size):
    padded = torch.zeros(size, dtype=t.dtype)
    padded[: len(t)] = t
    out = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(out, padded)
    return torch.cat(out)


@torch.no_grad()
def accuracy(net, loader, n_total):
    net.eval()
    preds, labels = [], []
    for x, y in loader:
        preds.append(net(x).argmax(-1))
        labels.append(y)
    preds, labels = torch.cat(preds), torch.cat(labels)
    per_rank = -(-n_total // dist.get_world_size())
    own = torch.zeros(per_rank, dtype=torch.bool)
    own[: len(preds)] = True
    all_preds = gather_padded(preds, per_rank)
    all_labels = gather_padded(labels, per_rank)
    net.train()
    valid = gather_padded(own, per_rank)
    return (all_preds == all_labels)[valid].float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = gaussians(120, 0), gaussians(33, 1)
    shard = Subset(test, range(rank, len(test), world))  # no duplicates
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=10, sampler=sampler)
    test_loader = DataLoader(shard, batch_size=10)
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        acc = accuracy(model.module, test_loader, len(test))
        if rank == 0:
            print(f"epoch {epoch} test accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
