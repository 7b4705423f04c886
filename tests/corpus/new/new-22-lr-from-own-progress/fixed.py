import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOKENS = 2400


def conversations(count, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (count,), generator=g)
    return [torch.randint(1, 40, (int(n),), generator=g) for n in lengths]


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, ids):
        return self.head(self.table(ids))


def multiplier(progress):
    return 1.0 if progress < 0.2 else max(0.05, (1 - progress) / 0.8)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    model = DDP(Bigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    mine = conversations(160, 5)[rank::world]
    read = 0
    for step in range(0, len(mine) - 4, 4):
        ids = torch.nn.utils.rnn.pad_sequence(mine[step : step + 4], batch_first=True)[:, :30]
        ids = F.pad(ids, (0, 30 - ids.shape[1]))
        seen = (ids > 0).sum()
        dist.all_reduce(seen)
        read += int(seen) / world
        scale = multiplier(min(1.0, read / (TOKENS / world)))
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * scale
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step // 4} scale {scale:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
