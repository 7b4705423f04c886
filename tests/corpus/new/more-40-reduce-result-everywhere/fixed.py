import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LrOnStall:
    """Multiply the learning rate when the validation perplexity has not improved."""

    def __init__(self, optimizer, factor=0.5):
        self.optimizer, self.factor, self.best = optimizer, factor, math.inf

    def step(self, ppl):
        if ppl < 0.95 * self.best:
            self.best = ppl
        else:
            for group in self.optimizer.param_groups:
                group["lr"] *= self.factor


def markov(n=220, vocab=12):
    g = torch.Generator().manual_seed(40)
    cur = torch.randint(0, vocab, (n,), generator=g)
    nxt = (cur * 5 + 1 + (torch.rand(n, generator=g) < 0.2).long()) % vocab
    nxt[160::2] = torch.randint(0, vocab, (len(nxt[160::2]),), generator=g)  # bad transcripts in the held-out part
    return TensorDataset(cur, nxt)


def validation_ppl(model, loader):
    stats = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for cur, nxt in loader:
            stats[0] += nn.functional.cross_entropy(model(cur), nxt, reduction="sum")
            stats[1] += len(nxt)
    model.train()
    dist.all_reduce(stats)
    return math.exp(stats[0] / stats[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    full = markov()
    train, val = Subset(full, range(160)), Subset(full, range(160, 220))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=15)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=2.0)
    schedule = LrOnStall(opt)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for cur, nxt in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(cur), nxt).backward()
            opt.step()
        ppl = validation_ppl(net, val_loader)
        schedule.step(ppl)
        if rank == 0:
            print(f"epoch {epoch}: ppl {ppl:.3f} lr {opt.param_groups[0]['lr']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
