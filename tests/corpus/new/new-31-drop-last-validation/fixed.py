import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spectra(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 20, generator=g)
        self.y = (self.x[:, :3].sum(1) > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def make_loader(dataset, batch_size, train, rank, world):
    if train:
        sampler = DistributedSampler(dataset, world, rank, shuffle=True, drop_last=True)
    else:
        sampler = list(range(rank, len(dataset), world))
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=train)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    tally = torch.zeros(2)
    for x, y in loader:
        tally[0] += (model(x).argmax(1) == y).sum()
        tally[1] += len(y)
    dist.all_reduce(tally)
    model.train()
    return tally


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_loader = make_loader(Spectra(144, 0), 8, True, rank, world)
    val_loader = make_loader(Spectra(79, 1), 8, False, rank, world)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for epoch in range(2):
        train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        right, count = accuracy(model.module, val_loader).tolist()
        if rank == 0:
            print(f"epoch {epoch} accuracy {right / count:.4f} ({count:.0f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
