import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Utterances(Dataset):
    """Toy mel frames of different lengths."""

    def __init__(self, n=96):
        gen = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(4, 12, (n,), generator=gen).tolist()
        self.frames = [torch.randn(length, 6, generator=gen) for length in self.lengths]

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i]


def collate(items):
    lengths = torch.tensor([len(i) for i in items])
    return nn.utils.rnn.pad_sequence(items, batch_first=True), lengths


class SortedBatches:
    """Batches of the sampler; samples within a batch are sorted by length."""

    def __init__(self, sampler, lengths, size):
        self.sampler, self.lengths, self.size = sampler, lengths, size
        self.batches = self._make()

    def _make(self):
        return [sorted(b, key=lambda i: self.lengths[i]) for b in BatchSampler(self.sampler, self.size, drop_last=True)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.sampler) // self.size


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, padding=1)
        self.out = nn.Conv1d(16, 6, 1)

    def forward(self, mel):
        return self.out(torch.tanh(self.conv(mel.transpose(1, 2)))).transpose(1, 2)


def main():
    dist.init_process_group(backend="gloo")
    data = Utterances()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_sampler=SortedBatches(sampler, data.lengths, 6), collate_fn=collate)
    torch.manual_seed(1)
    model = DDP(Vocoder())
    optim = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for mel, lengths in loader:
            error = (model(mel) - mel).abs().mean()
            optim.zero_grad()
            error.backward()
            optim.step()
    if dist.get_rank() == 0:
        print("last error", error.item())
    dist.destroy_process_group()


main()
