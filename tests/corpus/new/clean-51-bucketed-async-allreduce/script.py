import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FlatReducer:
    def __init__(self, module, limit=200):
        self.world = dist.get_world_size()
        self.buckets, size = [[]], 0
        for p in reversed(list(module.parameters())):
            dist.broadcast(p.data, src=0)
            if size + p.numel() > limit:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.numel()

    def reduce(self):
        pending = []
        for bucket in filter(None, self.buckets):
            flat = _flatten_dense_tensors([p.grad for p in bucket])
            pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in pending:
            work.wait()
            flat /= self.world
            for p, g in zip(bucket, _unflatten_dense_tensors(flat, [p.grad for p in bucket])):
                p.grad.copy_(g)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    reducer = FlatReducer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(x, x[:, :2].prod(1, keepdim=True))
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(bx), by).backward()
            reducer.reduce()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
