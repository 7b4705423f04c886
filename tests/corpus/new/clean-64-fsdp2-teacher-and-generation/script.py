import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(0, 30, (64, 12), generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30))
    teacher = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)).requires_grad_(False)
    for layer in (model[1], model[3], model, teacher):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (tokens,) in enumerate(loader):
            model.set_requires_gradient_sync(i % 2 == 1)
            logits = model(tokens[:, :-1])
            with torch.no_grad():
                goal = teacher(tokens[:, :-1])
            valid = tokens[:, 1:] != 0
            count = valid.sum().float()
            dist.all_reduce(count)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            loss = (loss * valid.flatten()).sum() * world / count + 0.1 * F.mse_loss(logits, goal)
            (loss / 2).backward()
            if i % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            token = torch.tensor([rank + 1])
            finished = torch.zeros(1)
            while finished.item() < world:
                token = model(token[None]).argmax(-1)[0]
                finished = torch.ones(1)
                dist.all_reduce(finished)
        model.train()
    dist.destroy_process_group()


main()
