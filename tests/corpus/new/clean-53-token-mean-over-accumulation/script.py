from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IGNORE, GROUP = -100, 2


def sentences(n):
    g = torch.Generator().manual_seed(13)
    ids = torch.randint(0, 30, (n, 12), generator=g)
    labels = (ids + 7) % 30
    keep = torch.randint(2, 13, (n, 1), generator=g)
    return TensorDataset(ids, torch.where(torch.arange(12) < keep, labels, IGNORE))


def groups(loader):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == GROUP:
            yield group
            group = []


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = sentences(128)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for group in groups(loader):
            valid = torch.tensor(float(sum((labels != IGNORE).sum() for _, labels in group)))
            dist.all_reduce(valid)
            for i, (ids, labels) in enumerate(group):
                with nullcontext() if i == len(group) - 1 else model.no_sync():
                    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                    (total * world / valid).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
