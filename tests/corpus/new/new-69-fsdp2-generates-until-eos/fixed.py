import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def generate(model, token, limit=12):
    for _ in range(limit):
        token = (token * 3 + model(F.one_hot(token, 16).float()).argmax(-1)) % 16
    return token


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 16, (64,), generator=g)
    data = TensorDataset(F.one_hot(x, 16).float(), (x * 5 + 3) % 16)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            for prompt in range(4):
                generate(model, torch.tensor([(prompt * 2 + rank * 7) % 16]))
    dist.destroy_process_group()


main()
