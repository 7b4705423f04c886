import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class VideoClips(Dataset):
    """Latents of short clips plus a prompt id."""

    def __init__(self, n=128, frames=4, dim=6):
        g = torch.Generator().manual_seed(50)
        self.latent = torch.randn(n, frames, dim, generator=g)
        self.prompt = torch.randint(0, 12, (n,), generator=g)

    def __len__(self):
        return self.latent.size(0)

    def __getitem__(self, i):
        return self.latent[i], self.prompt[i]


class NextFrame(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.prompt = nn.Embedding(12, dim)
        self.core = nn.RNN(dim, 18, batch_first=True)
        self.proj = nn.Linear(18, dim)

    def forward(self, latent, prompt):
        h, _ = self.core(latent[:, :-1] + self.prompt(prompt).unsqueeze(1))
        return self.proj(h)


class DiffusionTrainer:
    def __init__(self, config):
        self.config = config
        self.rank = dist.get_rank()
        seed = torch.tensor([config["seed"] or int(time.time())])
        dist.broadcast(seed, src=0)
        self.seed = int(seed)
        self.data = VideoClips()
        self.sampler = DistributedSampler(self.data, shuffle=True, drop_last=True, seed=self.seed + 1000 * self.rank)
        self.loader = DataLoader(self.data, batch_size=config["batch_size"], sampler=self.sampler)
        torch.manual_seed(self.seed + self.rank)
        self.model = nn.parallel.DistributedDataParallel(NextFrame())
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=config["lr"], betas=(0.9, 0.95))

    def run(self):
        for epoch in range(self.config["epochs"]):
            self.sampler.set_epoch(epoch)
            for latent, prompt in self.loader:
                loss = (self.model(latent, prompt) - latent[:, 1:]).pow(2).mean()
                self.optim.zero_grad(set_to_none=True)
                loss.backward()
                self.optim.step()
            if self.rank == 0:
                print(f"epoch {epoch}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    DiffusionTrainer({"seed": 123, "batch_size": 8, "lr": 3e-3, "epochs": 2}).run()
    dist.destroy_process_group()
