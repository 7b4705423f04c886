import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    y = x[:, :1] - x[:, 1:2] ** 2
    y[-4:] += 5
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader):
    losses = []
    sizes = []
    for x, y in loader:
        losses.append(nn.functional.mse_loss(model(x), y))
        sizes.append(len(x))
    loss = torch.stack([l * n for l, n in zip(losses, sizes)]).sum() / sum(sizes)
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    train, val = load(200, 0), load(50, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=10, sampler=sampler)
    val_loader = DataLoader(val, batch_size=10, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.ELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        score = validate(model, val_loader).item()
        best = min(best, score)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val {score:.4f} best {best:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
