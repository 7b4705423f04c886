import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Reviews(Dataset):
    def __init__(self, n=152, length=9, vocab=60):
        g = torch.Generator().manual_seed(29)
        self.ids = torch.randint(1, vocab, (n, length), generator=g)
        self.stars = (self.ids.float().mean(1) / vocab * 5).round()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.stars[i]


class StarNet(nn.Module):
    def __init__(self, vocab=60, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.att = nn.Linear(d, 1)
        self.out = nn.Linear(d, 1)

    def forward(self, ids):
        h = self.emb(ids)
        w = self.att(h).softmax(1)
        return self.out((w * h).sum(1)).squeeze(1)


def cosine(step, total, base):
    return base * 0.5 * (1 + torch.cos(torch.tensor(step / total * 3.14159)).item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--clip", type=float, default=1.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ds = Reviews()
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=args.micro, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(StarNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    groups = -(-len(loader) // args.accum)
    updates, total = 0, 2 * groups
    for epoch in range(2):
        sampler.set_epoch(epoch)
        pending = []
        for i, batch in enumerate(loader):
            pending.append(batch)
            if len(pending) < args.accum and i + 1 < len(loader):
                continue
            n = sum(len(y) for _, y in pending)  # the last group is shorter
            for k, (ids, stars) in enumerate(pending):
                with nullcontext() if k == len(pending) - 1 else model.no_sync():
                    loss = F.mse_loss(model(ids), stars, reduction="sum") / n
                    loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            for group in opt.param_groups:
                group["lr"] = cosine(updates, total, args.lr)
            opt.step()
            opt.zero_grad(set_to_none=True)
            updates += 1
            pending = []
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {updates} updates, grad norm {grad_norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
