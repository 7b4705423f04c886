import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RECORDS = 160


def read_record(i):
    g = torch.Generator().manual_seed(10_000 + i)
    x = torch.randn(3, 16, generator=g)
    return x, x[0].argmax() // 4


class RecordStream(IterableDataset):
    """Each process reads its own records, so the files are opened only once per job."""

    def __init__(self, n, rank, world_size):
        self.n = n
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        first, stride = self.rank, self.world_size
        for i in range(first, self.n, stride):
            yield read_record(i)


class SignalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv1d(3, 10, 4, stride=2)
        self.o = nn.Linear(70, 4)

    def forward(self, x):
        return self.o(F.relu(self.c(x)).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = RecordStream(RECORDS, rank, world_size)
    loader = DataLoader(stream, batch_size=10, num_workers=2)

    torch.manual_seed(0)
    net = DDP(SignalNet())
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(1):
        seen = 0
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += len(y)
        if rank == 0:
            print(f"epoch {epoch}: {seen * world_size} records, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
