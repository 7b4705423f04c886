import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def reduce_mean(tensor):
    out = tensor.detach().clone()
    dist.all_reduce(out, op=dist.ReduceOp.SUM)
    out /= dist.get_world_size()
    return out


def dataset():
    g = torch.Generator().manual_seed(5)
    x = torch.rand(128, 6, generator=g)
    return TensorDataset(x, x.mean(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = dataset()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = (model(x) - y).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        mean = reduce_mean(total / len(loader))
        if rank == 0:
            print(f"epoch {epoch}: mean absolute error {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
