import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def end_of_epoch(epoch, scheduler, is_main):
    scheduler.step()
    if is_main:
        print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f}")


def main():
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        end_of_epoch(epoch, scheduler, is_main)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
