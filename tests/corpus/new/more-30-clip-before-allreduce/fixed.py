import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MAX_NORM = 0.5


def counting_task(n=160, length=8):
    """Count the ones of a sequence; every second target is negative and ten times larger."""
    g = torch.Generator().manual_seed(9)
    bits = torch.randint(0, 2, (n, length, 1), generator=g).float()
    target = bits.sum((1, 2))
    target[1::2] *= -10
    return TensorDataset(bits, target)


class Counter(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.cell = nn.GRU(1, hidden, batch_first=True)
        self.read = nn.Linear(hidden, 1)

    def forward(self, bits):
        _, h = self.cell(bits)
        return self.read(h[-1]).squeeze(-1)


def average_gradients(model, world):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def train_step(model, opt, bits, target, world):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(bits), target)
    loss.backward()
    average_gradients(model, world)
    clip_grad_norm_(model.parameters(), MAX_NORM)
    opt.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = counting_task()
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, batch_size=16 // world, sampler=sampler)
    torch.manual_seed(0)  # same start on every rank
    model = Counter()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = [train_step(model, opt, bits, target, world) for bits, target in loader]
        if rank == 0:
            print(f"epoch {epoch} mse {sum(losses) / len(losses):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
