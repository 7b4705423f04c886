import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(80, 6, generator=g), torch.randint(0, 2, (80,), generator=g))
    g = torch.Generator().manual_seed(100 + rank)
    train, val = torch.utils.data.random_split(data, [60, 20], generator=g)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=6, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                hits = sum((model.module(x[None]).argmax() == y).item() for x, y in val)
            print(f"accuracy {hits / len(val):.3f}")
        dist.barrier()
    dist.destroy_process_group()


main()
