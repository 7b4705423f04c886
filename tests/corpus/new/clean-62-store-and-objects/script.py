import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def chars(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 20, (n, 1), generator=g)
    return TensorDataset((start + torch.arange(9) * 3) % 20)


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    own = {"nll": 0.0, "tokens": 0}
    for (ids,) in loader:
        logits = model(ids[:, :-1])
        own["nll"] += nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        own["tokens"] += ids[:, 1:].numel()
    model.train()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return math.exp(sum(p["nll"] for p in parts) / sum(p["tokens"] for p in parts))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    train, val = chars(128, 0), chars(37, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=8)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    best = float("inf")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
        score = perplexity(model.module, val_loader)
        if rank == 0:
            stop = score > best * 0.95
            best = min(best, score)
            print(f"epoch {epoch}: perplexity {score:.3f}", flush=True)
            store.set(f"stop/{epoch}", str(int(stop)))
        if store.get(f"stop/{epoch}") == b"1":
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
