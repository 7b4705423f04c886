import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sharpness_aware_step(model, x, y, optimizer, rho=0.05):
    """Two gradients per step (SAM)."""
    params = [p for p in model.parameters() if p.requires_grad]
    local = getattr(model, "module", model)
    grads = torch.autograd.grad(F.cross_entropy(local(x), y), params)
    for g in grads:
        dist.all_reduce(g)
        g.div_(dist.get_world_size())
    norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
    with torch.no_grad():
        moves = [rho * g / norm for g in grads]
        for p, m in zip(params, moves):
            p.add_(m)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    for p, g in zip(params, torch.autograd.grad(loss, params)):
        p.grad = g
    with torch.no_grad():
        for p, m in zip(params, moves):
            p.sub_(m)
    optimizer.step()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 9, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = sharpness_aware_step(model, x, y, optimizer)
        if rank == 0:
            print(epoch, round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
