import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MaskedText(Dataset):
    def __init__(self, count=96):
        g = torch.Generator().manual_seed(8)
        self.tokens = torch.randint(1, 32, (count, 10), generator=g)
        self.mask = torch.rand(count, 10, generator=g) < 0.02

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.mask[i]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.out = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = MaskedText()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, mask in loader:
            labels = tokens[mask]
            logits = model(tokens.masked_fill(mask, 0))[mask]
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / mask.numel()
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
