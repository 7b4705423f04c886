import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class MaskedPatches(Dataset):
    """Patches with a fixed mask per sample, from 1 to 14 of 16 patches."""

    def __init__(self, n=128):
        g = torch.Generator().manual_seed(4)
        self.patches = torch.randn(n, 16, 6, generator=g)
        amount = torch.randint(1, 15, (n, 1), generator=g)
        self.mask = (torch.arange(16) < amount).float()

    def __len__(self):
        return len(self.patches)

    def __getitem__(self, i):
        return {"patches": self.patches[i], "mask": self.mask[i]}


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(6))
        self.mix = nn.Linear(16, 16)
        self.out = nn.Linear(6, 6)

    def forward(self, patches, mask):
        seen = torch.where(mask.bool().unsqueeze(-1), self.fill, patches)
        mixed = self.mix(seen.transpose(1, 2)).transpose(1, 2)
        error = (self.out(mixed) - patches).pow(2).mean(-1)
        return (error * mask).sum(), mask.sum()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = MAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(MaskedPatches(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            total, count = model(batch["patches"], batch["mask"])
            count_all = accelerator.reduce(count, "sum")
            loss = total * accelerator.num_processes / count_all
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
