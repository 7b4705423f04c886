import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 24


class Scans(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(9)
        self.images = torch.randn(144, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i] * 0.5, self.images[i]


def average(value):
    """The mean over all processes."""
    dist.all_reduce(value)
    value /= dist.get_world_size()
    return value


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Scans()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for undersampled, image in loader:
            loss = nn.functional.l1_loss(model(undersampled), image)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = average(loss.detach())
        if rank == 0:
            print(f"epoch {epoch}: l1 {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
