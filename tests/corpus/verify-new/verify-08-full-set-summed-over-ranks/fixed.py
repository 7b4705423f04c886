import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits(n, seed):
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))
    label = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(prototypes[label] + 0.7 * torch.randn(n, 16, generator=g), label)


def test(model, loader, n):
    correct = torch.tensor(0)
    with torch.no_grad():
        for image, label in loader:
            correct += model(image).argmax(1).eq(label).sum()
    dist.all_reduce(correct)
    return correct.item() / n


def train_process(rank, world_size, init_file):
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size)
    train_set, test_set = digits(200, 0), digits(50, 1)
    sampler = DistributedSampler(train_set, world_size, rank)
    train_loader = DataLoader(train_set, 10, sampler=sampler)
    test_part = torch.utils.data.Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, 25)
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(16, 5))
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, label in train_loader:
            sgd.zero_grad()
            nn.functional.cross_entropy(model(image), label).backward()
            sgd.step()
        accuracy = test(model.module, test_loader, len(test_set))
        if rank == 0:
            print(f"[{epoch}] accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    path = os.path.join(tempfile.mkdtemp(), "rendezvous")
    mp.spawn(train_process, nprocs=2, args=(2, path), join=True)
