import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(folder, model, optimizer, epoch, rank):
    torch.save(torch.get_rng_state(), os.path.join(folder, f"rng-{rank}.pt"))
    if rank == 0:
        partial = os.path.join(folder, "model.pt.tmp")
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, partial)
        os.replace(partial, os.path.join(folder, "model.pt"))
    dist.barrier()


def restore(folder, model, optimizer, rank):
    path = os.path.join(folder, "model.pt")
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(torch.load(os.path.join(folder, f"rng-{rank}.pt")))
    return state["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = "state"
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(3, 3))
    opt = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(48, 3, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(restore(folder, model, opt, rank), 2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = (model(x + torch.randn_like(x)) - x).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        save(folder, model, opt, epoch, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
