import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 3, (n,), generator=g)
    mu = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return TensorDataset(mu[k] + torch.randn(n, 2, generator=g), k)


class MeanTeacher:
    """Student with DDP; the teacher is an average of the student and kept on every process."""

    def __init__(self, net, momentum=0.95):
        self.student = DDP(net)
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        self.polyak = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.m = momentum

    def loss(self, x, y, noisy):
        logits = self.student(noisy)
        with torch.no_grad():
            soft = self.teacher(x).softmax(-1)
        return F.cross_entropy(logits, y) + 0.3 * F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean")

    @torch.no_grad()
    def after_step(self):
        for t, s in zip(self.teacher.parameters(), self.student.module.parameters()):
            t.mul_(self.m).add_(s, alpha=1 - self.m)
        self.polyak.update_parameters(self.student.module)


@torch.no_grad()
def accuracy(net, ds):
    rank, world = dist.get_rank(), dist.get_world_size()
    hit = n = 0
    for x, y in DataLoader(Subset(ds, range(rank, len(ds), world)), batch_size=32):
        hit += (net(x).argmax(1) == y).sum().item()
        n += len(y)
    both = torch.tensor([hit, n])
    dist.all_reduce(both)
    return both[0].item() / both[1].item(), both[1].item()


def main():
    dist.init_process_group("gloo")
    train_set, val_set = blobs(192, 0), blobs(75, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    mt = MeanTeacher(nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.Adam(mt.student.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(10 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = mt.loss(x, y, x + 0.1 * torch.randn(x.shape, generator=noise))
            opt.zero_grad()
            loss.backward()
            opt.step()
            mt.after_step()
        acc, n = accuracy(mt.polyak, val_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: EMA accuracy {acc:.3f} on {n}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
