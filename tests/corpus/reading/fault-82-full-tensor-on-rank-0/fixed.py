import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def export(model, rank, path):
    shards = model.state_dict()
    full = {name: value.full_tensor().cpu() for name, value in shards.items()}
    if rank == 0:
        torch.save(full, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(Block(8), Block(8))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(8, 8, generator=gen)
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    export(model, rank, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
