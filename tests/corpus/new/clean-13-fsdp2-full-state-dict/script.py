import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CKPT = "encoder_full.pt"


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, d=12, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def build(mesh, seed):
    torch.manual_seed(seed)
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(mesh, seed=0)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(96, 4, 12, generator=g)
    ds = TensorDataset(x, x.mean(1)[:, :3].argmax(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()

    # all ranks take part in the gather, rank 0 gets (and writes) the result
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, CKPT)
        print(f"loss {loss.item():.4f}, saved {len(full)} tensors", flush=True)
    dist.barrier()

    # and back: rank 0 reads, the others receive their shards
    again = build(mesh, seed=1)
    state = torch.load(CKPT) if rank == 0 else {}
    set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    same = torch.tensor(float(all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), again.parameters()))))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if rank == 0:
        print("restored" if same.item() else "MISMATCH", flush=True)
        os.remove(CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
