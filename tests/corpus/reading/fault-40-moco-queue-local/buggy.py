import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Contrast(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.register_buffer("queue", torch.zeros(size, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        start = int(self.pointer)
        self.queue[start : start + len(keys)] = keys
        self.pointer[0] = (start + len(keys)) % len(self.queue)

    def forward(self, x):
        q = nn.functional.normalize(self.encoder(x), dim=1)
        logits = q @ self.queue.clone().T
        self.enqueue(q.detach())
        return logits


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Contrast(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).logsumexp(1).mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
