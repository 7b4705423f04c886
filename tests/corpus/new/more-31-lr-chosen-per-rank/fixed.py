import torch
import torch.distributed as dist
import torch.nn as nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CANDIDATES = torch.logspace(-3, 0, 31).tolist()


def housing(n=192):
    g = torch.Generator().manual_seed(37)
    x = torch.randn(n, 8, generator=g)
    price = x @ torch.linspace(-1, 1, 8).unsqueeze(1) + 0.1 * torch.randn(n, 1, generator=g)
    x[::2] *= 3.0  # different unit in every second record
    return TensorDataset(x, price)


def pick_lr(model, batch, loss_fn):
    """Largest single-step improvement on one batch."""
    x, y = batch
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(loss_fn(model(x), y), list(params.values()))
    best_lr, best_loss = CANDIDATES[0], float("inf")
    with torch.no_grad():
        for lr in CANDIDATES:
            trial = {k: p - lr * g for (k, p), g in zip(params.items(), grads)}
            loss = loss_fn(functional_call(model, trial, (x,)), y).item()
            if loss < best_loss:
                best_lr, best_loss = lr, loss
    return best_lr


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ds = housing()
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, batch_size=12, sampler=sampler)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1))
    loss_fn = nn.MSELoss()
    lr = torch.tensor(pick_lr(model, next(iter(loader)), loss_fn))
    dist.broadcast(lr, src=0)
    net = DDP(model)
    opt = torch.optim.SGD(net.parameters(), lr=lr.item())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_fn(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: lr {lr.item():.3f} mse {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
