import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, count=160):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(count, 12, generator=generator)
        self.labels = (self.images[:, :4].sum(1) > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def get_loader(args_batch):
    data = Digits()
    sampler = DistributedSampler(data)
    batches = BatchSampler(sampler, args_batch, drop_last=True)
    return DataLoader(data, batch_sampler=batches, num_workers=0), sampler


def train():
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 2))
    net = nn.parallel.DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader, sampler = get_loader(16)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for image, label in loader:
            sgd.zero_grad(set_to_none=True)
            F.cross_entropy(net(image), label).backward()
            sgd.step()
    if int(os.environ["RANK"]) == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
