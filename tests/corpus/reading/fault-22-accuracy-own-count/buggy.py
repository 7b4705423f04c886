import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    correct = torch.zeros(1)
    seen = torch.zeros(1)
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum()
        seen += len(y)
    dist.all_reduce(correct)
    return (correct / seen).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    train = TensorDataset(torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g))
    test = TensorDataset(torch.randn(33, 4, generator=g), torch.randint(0, 3, (33,), generator=g))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=8)
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        value = accuracy(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {value:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
