import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    if rank == 0 and os.path.exists("pretrained.pt"):
        net.load_state_dict(torch.load("pretrained.pt", map_location="cpu"))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1])
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, 16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            noisy = bx + 0.01 * torch.randn_like(bx)
            loss = nn.functional.mse_loss(model(noisy), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        torch.save(net.state_dict(), "pretrained.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
