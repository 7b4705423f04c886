import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, patches):
        return ((self.out(self.proj(patches).relu()) - patches) ** 2).mean()


def process_one_batch(model, batch):
    (patches,) = batch
    loss = model(patches)
    return loss


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    torch.manual_seed(4)
    model = DistributedDataParallel(Patches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(torch.randn(128, 16, generator=torch.Generator().manual_seed(2)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = process_one_batch(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"[{dist.get_rank()}] epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
