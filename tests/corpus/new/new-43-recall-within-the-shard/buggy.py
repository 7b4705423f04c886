import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    docs = torch.randn(n, 10, generator=g)
    return TensorDataset(docs + 1.2 * torch.randn(n, 10, generator=g), docs)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.doc = nn.Linear(10, 12), nn.Linear(10, 12)

    def forward(self, q, d):
        return nn.functional.normalize(self.query(q), dim=1), nn.functional.normalize(self.doc(d), dim=1)


def gathered(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def recall_at_1(model, loader):
    model.eval()
    outs = [model(q, d) for q, d in loader]
    q, d = (torch.cat(side) for side in zip(*outs))
    hits = ((q @ d.T).argmax(1) == torch.arange(len(q))).float().sum()
    result = torch.stack([hits, torch.tensor(float(len(q)))])
    dist.all_reduce(result)
    model.train()
    return (result[0] / result[1]).item()


def main():
    dist.init_process_group("gloo")
    train, test = pairs(128, 0), pairs(48, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(0)
    model = DDP(Towers())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for q, d in loader:
            a, b = model(q, d)
            loss = ((a - b) ** 2).sum(1).mean() + (a.mean(1) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = recall_at_1(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: recall@1 {score:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
