import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH, MAX_NORM = 16, 0.05


def clip_gradients(model):
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack([g.norm() ** 2 for g in shards]).sum()
    dist.all_reduce(norm)
    scale = torch.clamp(MAX_NORM / (norm.sqrt() + 1e-6), max=1.0)
    for g in shards:
        g.mul_(scale)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(13)
    x = torch.randn(128, 8, generator=g)
    data = TensorDataset(x, x[:, :4].pow(2))
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            clip_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
