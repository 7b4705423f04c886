import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Tower(nn.Module):
    def __init__(self, d_in, d_out=12):
        super().__init__()
        self.up = nn.Linear(d_in, 48)
        self.down = nn.Linear(48, d_out)

    def forward(self, x):
        return nn.functional.normalize(self.down(torch.relu(self.up(x))), dim=-1)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower(10)
        self.classes = nn.Linear(12, 6, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.classes(self.tower(x)) * self.log_scale.exp()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(6)
    model = Matcher()
    fully_shard(model.tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(144, 10, generator=g)
    data = TensorDataset(x, x[:, :6].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
