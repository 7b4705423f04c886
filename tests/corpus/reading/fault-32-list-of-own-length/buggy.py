import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def hard_examples(model, loader, threshold):
    found = []
    for x, y in loader:
        with torch.no_grad():
            losses = (model(x) - y).square().squeeze(1)
        found.extend(losses[losses > threshold].tolist())
    return found


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        hard = torch.tensor(hard_examples(model.module, loader, 0.5))
        dist.all_reduce(hard)
        if dist.get_rank() == 0:
            print("hard", hard.sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
