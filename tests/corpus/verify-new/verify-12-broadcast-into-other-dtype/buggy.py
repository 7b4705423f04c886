import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4


def imbalanced(n=160):
    g = torch.Generator().manual_seed(12)
    y = torch.multinomial(torch.tensor([0.55, 0.25, 0.12, 0.08]), n, replacement=True, generator=g)
    x = nn.functional.one_hot(y, 6).float() + 0.6 * torch.randn(n, 6, generator=g)
    return TensorDataset(x, y)


def class_weights(dataset, rank):
    """Computed once, on rank 0: it reads the whole data set."""
    if rank == 0:
        counts = torch.bincount(dataset.tensors[1], minlength=CLASSES).double()
        weights = counts.sum() / (CLASSES * counts)
    else:
        weights = torch.zeros(CLASSES, dtype=torch.int64)
    dist.broadcast(weights, src=0)
    return weights.float()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = imbalanced()
    weights = class_weights(data, rank)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    net = DDP(nn.Linear(6, CLASSES))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            per_sample = nn.functional.cross_entropy(net(x), y, reduction="none")
            loss = (per_sample * weights[y]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        print("loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
