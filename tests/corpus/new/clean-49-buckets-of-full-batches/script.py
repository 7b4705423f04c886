import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Sampler


class Buckets(Sampler):
    """Batches of sequences with similar lengths, of which every rank takes a part; what fills no batch is left out."""

    def __init__(self, lengths, size):
        self.lengths, self.size, self.epoch = lengths, size, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        order = sorted(shuffled, key=lambda index: self.lengths[index])
        step = self.size * dist.get_world_size()
        starts = range(0, len(order) - step + 1, step)
        for number in torch.randperm(len(starts), generator=generator).tolist():
            batch = order[starts[number] : starts[number] + step]
            yield batch[dist.get_rank() :: dist.get_world_size()]


class Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, inputs, lengths):
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.encoder(packed)[1][-1])[:, 0]


def collate(batch):
    return pad_sequence(batch, batch_first=True), torch.tensor([len(each) for each in batch])


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (100,), generator=generator).tolist()
    data = [torch.randn(length, 8, generator=generator) for length in lengths]
    buckets = Buckets(lengths, 4)
    loader = DataLoader(data, batch_sampler=buckets, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(Lengths())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        buckets.epoch = epoch
        for inputs, count in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs, count), count / 20).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
