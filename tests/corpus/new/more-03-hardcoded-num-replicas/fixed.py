import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# ---- settings -------------------------------------------------
BATCH_PER_GPU = 8
LR = 1e-2
N_EPOCHS = 3
# ----------------------------------------------------------------


class SpeechCommands(Dataset):
    """Fake mel spectrograms, 4 keywords."""

    def __init__(self, n=192):
        g = torch.Generator().manual_seed(31)
        self.label = torch.arange(n) % 4
        self.mel = torch.randn(n, 10, 12, generator=g)
        self.mel[torch.arange(n), self.label * 2] += 1.5

    def __getitem__(self, idx):
        return self.mel[idx], self.label[idx]

    def __len__(self):
        return len(self.label)


class KWS(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(10, 16, batch_first=True, bidirectional=True)
        self.cls = nn.Linear(32, 4)

    def forward(self, mel):
        out, _ = self.gru(mel.transpose(1, 2))
        return self.cls(out.mean(1))


def make_loader(ds):
    sampler = DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True)
    return sampler, DataLoader(ds, batch_size=BATCH_PER_GPU, sampler=sampler, drop_last=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(KWS())
    opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    sampler, loader = make_loader(SpeechCommands())
    for epoch in range(N_EPOCHS):
        sampler.set_epoch(epoch)
        hits = seen = 0
        for mel, label in loader:
            logits = net(mel)
            loss = F.cross_entropy(logits, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += (logits.argmax(1) == label).sum().item()
            seen += len(label)
        stats = torch.tensor([hits, seen])
        dist.all_reduce(stats)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train acc {stats[0] / stats[1]:.3f} ({stats[1]} clips)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
