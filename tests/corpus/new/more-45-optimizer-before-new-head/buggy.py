import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class PretrainedNet(nn.Module):
    """Ten-class network from a model zoo."""

    def __init__(self, n_classes=10):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2))
        self.fc = nn.Linear(32, n_classes)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def textures(n=128):
    g = torch.Generator().manual_seed(28)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.rand(n, 1, 9, 9, generator=g)
    for i in range(n):
        x[i, 0, :: int(y[i]) + 1] += 0.7
    return TensorDataset(x, y)


class Finetuning:
    def __init__(self, n_classes, lr):
        torch.manual_seed(0)
        self.model = PretrainedNet()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.replace_head(n_classes)
        self.ddp = DDP(self.model)
        data = textures()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=16, sampler=self.sampler)

    def replace_head(self, n_classes):
        self.model.fc = nn.Linear(self.model.fc.in_features, n_classes)

    def epoch(self, k):
        self.sampler.set_epoch(k)
        losses = []
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.ddp(x), y)
            loss.backward()
            self.opt.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    job = Finetuning(n_classes=3, lr=3e-3)
    for k in range(3):
        mean = job.epoch(k)
        if dist.get_rank() == 0:
            print(f"epoch {k}: {mean:.4f}", flush=True)
    dist.destroy_process_group()
