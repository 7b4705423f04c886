import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler


class Utterances(torch.utils.data.Dataset):
    def __init__(self, n=144):
        rng = random.Random(5)
        self.seqs = [[rng.randrange(1, 25) for _ in range(rng.randrange(4, 20))] for _ in range(n)]
        self.lengths = [len(s) for s in self.seqs]

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = torch.tensor(self.seqs[i])
        return s, (s.float().mean() > 12.5).float()


class BucketBatchSampler(Sampler):
    """Batches of sentences of similar length; order of batches shuffled per epoch."""

    def __init__(self, lengths, batch_size, seed=0):
        self.epoch, self.seed = 0, seed
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [by_length[k : k + batch_size] for k in range(0, len(by_length), batch_size)]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(self.batches)
        random.Random(self.seed + self.epoch).shuffle(order)
        return iter(order[self.rank :: self.world])

    def __len__(self):
        return len(self.batches) // self.world


def collate(items):
    return pad_sequence([s for s, _ in items], batch_first=True), torch.stack([y for _, y in items])


class BagOfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 12, padding_idx=0)
        self.out = nn.Linear(12, 1)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        return self.out((self.emb(ids) * mask).sum(1) / mask.sum(1)).squeeze(1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = Utterances()
    batches = BucketBatchSampler(data.lengths, batch_size=12)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(BagOfTokens())
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(3):
        batches.set_epoch(epoch)
        for ids, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids), y)
            opt.zero_grad(); loss.backward(); opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} batches, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
