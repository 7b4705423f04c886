import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        info = torch.utils.data.get_worker_info()
        if info is not None:
            rank, world = rank * info.num_workers + info.id, world * info.num_workers
        g = torch.Generator().manual_seed(0)
        for i in range(64):
            sample = torch.randn(6, generator=g)
            if i % world == rank:
                yield sample, sample[:1]


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Stream(), batch_size=8, num_workers=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
