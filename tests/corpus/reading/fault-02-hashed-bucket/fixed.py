import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Words(Dataset):
    def __init__(self, lines, buckets=64):
        self.lines = lines
        self.buckets = buckets

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        text, label = self.lines[index]
        tokens = [zlib.crc32(word.encode()) % self.buckets for word in text.split()]
        return torch.tensor(tokens[:4]), label


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(64, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.out(self.table(tokens))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    lines = [("a cat on a mat", 0), ("the dog in the fog", 1)] * 32
    data = Words(lines)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Bag())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, label in loader:
            opt.zero_grad(set_to_none=True)
            F.cross_entropy(model(tokens), label).backward()
            opt.step()
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
