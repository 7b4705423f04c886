import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BUCKETS, BATCH = 64, 16
WORDS = "the cat sat on a mat while birds sang in old trees near cold blue lakes".split()


class Sentences(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(23)
        self.picks = torch.randint(0, len(WORDS), (n, 6), generator=g).tolist()

    def __len__(self):
        return len(self.picks)

    def __getitem__(self, i):
        words = [WORDS[p] for p in self.picks[i]]
        ids = [hash(word) % BUCKETS for word in words]
        return torch.tensor(ids), torch.tensor(float(self.picks[i][0] % 2))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(BUCKETS, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, ids):
        return self.head(self.embedding(ids)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = DDP(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids), label)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
