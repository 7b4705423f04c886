import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def shard(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    policy = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    shard(policy, mesh)
    shard(reference, mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(32, 256))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            with torch.no_grad():
                target = reference(x)
            loss = (policy(x) - target).square().mean() + policy(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
