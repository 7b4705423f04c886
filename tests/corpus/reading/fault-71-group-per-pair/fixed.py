import torch
import torch.distributed as dist
import torch.nn as nn


def pair_group(rank, world, size=1):
    mine = None
    for start in range(0, world, size):
        members = list(range(start, min(start + size, world)))
        group = dist.new_group(members)
        if rank in members:
            mine = group
    return mine


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group = pair_group(rank, world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(8, 4, generator=gen)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen = loss.detach().clone()
        dist.all_reduce(seen, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
