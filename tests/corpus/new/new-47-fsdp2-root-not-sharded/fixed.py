import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Decoder(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def parallelize(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = parallelize(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 32, (128, 11), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (row,) in loader:
            logits = model(row[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
