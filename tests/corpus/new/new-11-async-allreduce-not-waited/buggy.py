import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 16


def all_reduce_and_rescale(tensors, denominator):
    sizes = [t.numel() for t in tensors]
    buffer = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(buffer, async_op=True)
    buffer.div_(denominator)
    for tensor, part in zip(tensors, buffer.split(sizes)):
        tensor.copy_(part.view_as(tensor))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(192, 12, generator=g)
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            all_reduce_and_rescale([p.grad for p in model.parameters()], world)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
