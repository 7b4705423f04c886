import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waveforms(Dataset):
    def __init__(self, n=120, t=32):
        g = torch.Generator().manual_seed(90)
        freq = torch.rand(n, 1, generator=g) * 5 + 1
        self.wave = torch.sin(freq * torch.linspace(0, 3, t)).unsqueeze(1)
        self.freq = freq.squeeze(1)

    def __len__(self):
        return len(self.freq)

    def __getitem__(self, i):
        return self.wave[i], self.freq[i]


class PitchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 7, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
        self.lin = nn.Linear(32, 1)

    def forward(self, w):
        return self.lin(self.conv(w).flatten(1)).squeeze(1)


def main(args):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, local rank {local_rank} on {device.type}", flush=True)
    torch.manual_seed(0)
    model = DDP(PitchNet().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Waveforms()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for wave, freq in loader:
            wave, freq = wave.to(device), freq.to(device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(wave), freq)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--lr", type=float, default=3e-3)
    cli.add_argument("--batch", type=int, default=12)
    cli.add_argument("--epochs", type=int, default=2)
    main(cli.parse_args())
