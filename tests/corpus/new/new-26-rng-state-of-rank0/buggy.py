import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(11, 32), nn.SiLU(), nn.Linear(32, 10))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def train(model, optimizer, loader, sampler, epochs):
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for (x,) in loader:
            t = torch.rand(len(x), 1)
            noise = torch.randn_like(x)
            loss = ((model((1 - t) * x + t * noise, t) - (noise - x)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(128, 10, generator=torch.Generator().manual_seed(9)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(1000 + rank)
    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, loader, sampler, range(2))

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "rng": torch.get_rng_state()}, "state.pt")
    dist.barrier()
    state = torch.load("state.pt")
    model.module.load_state_dict(state["model"])
    torch.set_rng_state(state["rng"])
    train(model, optimizer, loader, sampler, range(2, 5))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
