import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def preview(model, count=2):
    model.eval()
    z = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    out = model(z)
    model.train()
    return out


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(32, 8))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
        images = preview(model)
        if dist.get_rank() == 0:
            print(epoch, images.mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
