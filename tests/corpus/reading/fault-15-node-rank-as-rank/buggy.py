import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Toy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=g), torch.tensor(i % 3)


def train():
    dist.init_process_group(backend="gloo")
    node = int(os.environ.get("GROUP_RANK", 0))
    world = dist.get_world_size()
    dataset = Toy()
    sampler = DistributedSampler(dataset, num_replicas=world, rank=node, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    net = DDP(torch.nn.Linear(6, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
