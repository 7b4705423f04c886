import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class TickStream(IterableDataset):
    """Price ticks; parts are dealt to the DataLoader workers of all processes.

    The epoch lives in shared memory, so that persistent workers see set_epoch().
    """

    def __init__(self, n_parts=16, part_len=12, seed=9):
        super().__init__()
        self.n_parts, self.part_len, self.seed = n_parts, part_len, seed
        self._epoch = torch.zeros(1, dtype=torch.long).share_memory_()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def read_part(self, k):
        g = torch.Generator().manual_seed(10_000 + k)
        ticks = torch.randn(self.part_len, 6, generator=g).cumsum(1)
        for row in ticks:
            yield row[:-1], row[-1:]

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + int(self._epoch))
        order = torch.randperm(self.n_parts, generator=g).tolist()
        info = get_worker_info()
        n_workers = info.num_workers if info else 1
        me = self.rank * n_workers + (info.id if info else 0)
        for k in order[me :: self.world * n_workers]:
            yield from self.read_part(k)


def main():
    dist.init_process_group("gloo")
    stream = TickStream()
    loader = DataLoader(stream, batch_size=6, num_workers=2, persistent_workers=True)
    torch.manual_seed(2)
    net = DDP(nn.Sequential(nn.Linear(5, 18), nn.ReLU(), nn.Linear(18, 1)))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(2):
        stream.set_epoch(epoch)
        seen = torch.zeros(1)
        for past, nxt in loader:
            loss = nn.functional.smooth_l1_loss(net(past), nxt)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += len(nxt)
        dist.all_reduce(seen)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {int(seen)} ticks, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
