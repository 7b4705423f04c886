import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 32


@torch.no_grad()
def accuracy(model, loader, total):
    model.eval()
    hits = torch.zeros(())
    for inputs, labels in loader:
        hits += (model(inputs).argmax(1) == labels).sum()
        dist.all_reduce(hits)
    model.train()
    return hits.item() / total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(21)
    x = torch.randn(320, 10, generator=g)
    y = (x[:, 0] + x[:, 1] > 0).long()
    train, valid = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:], y[256:])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    shard = Subset(valid, range(rank, len(valid), world))
    valid_loader = DataLoader(shard, batch_size=8)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        score = accuracy(model, valid_loader, len(valid))
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
