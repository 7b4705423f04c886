import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, optimizer, every):
    for index, (x, y) in enumerate(loader):
        model.require_backward_grad_sync = (index + 1) % every == 0
        loss = nn.functional.mse_loss(model(x), y) / every
        loss.backward()
        if (index + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(4)
    x = torch.randn(256, 6, generator=g)
    data = TensorDataset(x, x.cumsum(1))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, every=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
