import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def get_device():
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)
        return torch.device("cuda", LOCAL_RANK)
    return torch.device("cpu")


def rating_data(n_users=40, n_items=25, n=240):
    g = torch.Generator().manual_seed(100)
    users = torch.randint(0, n_users, (n,), generator=g)
    items = torch.randint(0, n_items, (n,), generator=g)
    score = 3 + torch.sin(users.float()) + torch.cos(items.float())
    return TensorDataset(torch.stack([users, items, torch.arange(n)], 1), score)


class MatrixFactorization(nn.Module):
    def __init__(self, n_users=40, n_items=25, k=6):
        super().__init__()
        self.u = nn.Embedding(n_users, k)
        self.v = nn.Embedding(n_items, k)
        self.bias = nn.Parameter(torch.tensor(3.0))

    def forward(self, pair):
        return (self.u(pair[:, 0]) * self.v(pair[:, 1])).sum(-1) + self.bias


def get_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=13)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = get_device()
    loader, sampler = get_loader(rating_data(), 20)
    torch.manual_seed(0)
    model = DDP(MatrixFactorization().to(device))
    opt = optim.Adagrad(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        se = 0.0
        for pair, score in loader:
            pair, score = pair.to(device), score.to(device)
            loss = nn.functional.mse_loss(model(pair), score)
            opt.zero_grad()
            loss.backward()
            opt.step()
            se += loss.item()
        if dist.get_rank() == 0:
            print("epoch", epoch, "train mse %.4f" % (se / len(loader)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
