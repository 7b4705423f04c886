import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CenteredLoss(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, width))

    def forward(self, student, teacher):
        target = F.softmax((teacher - self.center) / 0.05, dim=-1).detach()
        loss = -(target * F.log_softmax(student / 0.1, dim=-1)).sum(-1).mean()
        self.update(teacher)
        return loss

    @torch.no_grad()
    def update(self, teacher):
        batch = teacher.mean(0, keepdim=True)
        dist.all_reduce(batch)
        batch /= dist.get_world_size()
        self.center = self.center * 0.9 + batch * 0.1


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(160, 8, generator=torch.Generator().manual_seed(5)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    student = DDP(student)
    criterion = CenteredLoss(6)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = criterion(student(x), teacher(x * 1.1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.module.parameters()):
                    t.mul_(0.95).add_(s, alpha=0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
