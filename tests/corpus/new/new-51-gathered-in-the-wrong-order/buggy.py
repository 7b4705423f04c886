import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, x.argmax(1))


@torch.no_grad()
def predict(model, loader):
    model.eval()
    local = torch.cat([model(x).argmax(1) for x, _ in loader])
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    model.train()
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    train, test = make(160, 0), make(40, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        predictions = predict(model, test_loader)
        accuracy = (predictions == test.tensors[1]).float().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
