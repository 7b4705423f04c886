import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, BLOCK, ACCUMULATE, STEPS = 4, 16, 4, 10


class Windows:
    """Consecutive windows of a token stream, dealt to the processes in turn."""

    def __init__(self, tokens, rank, world):
        self.tokens, self.rank, self.world, self.position = tokens, rank, world, rank * BATCH * BLOCK

    def next(self):
        chunk = self.tokens[self.position : self.position + BATCH * BLOCK + 1]
        self.position += self.world * BATCH * BLOCK
        if self.position + BATCH * BLOCK + 1 > len(self.tokens):
            self.position = self.rank * BATCH * BLOCK
        return chunk[:-1].view(BATCH, BLOCK), chunk[1:].view(BATCH, BLOCK)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, 50, (12000,), generator=torch.Generator().manual_seed(7))
    windows = Windows(tokens, rank, world)
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 50)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accumulate = ACCUMULATE * 2 // world
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulate):
            inputs, targets = windows.next()
            model.require_backward_grad_sync = micro == accumulate - 1
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / accumulate
            total += loss.detach()
            loss.backward()
        optimizer.step()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
