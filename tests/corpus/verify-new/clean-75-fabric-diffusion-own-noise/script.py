import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 3


class Denoiser(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, 48), nn.SiLU(), nn.Linear(48, d))

    def forward(self, x, level):
        return self.net(torch.cat([x, level], 1))


def groups(loader, size):
    """Lists of micro-batches; the last one may be shorter."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    own = torch.Generator().manual_seed(1000 + fabric.global_rank)
    x = torch.randn(112, 6, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 2, 6)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x), batch_size=7, shuffle=True))
    model = Denoiser()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for group in groups(loader, ACCUMULATE):
            for i, (clean,) in enumerate(group):
                level = torch.rand(len(clean), 1, generator=own)
                noise = torch.randn(clean.shape, generator=own)
                with fabric.no_backward_sync(model, enabled=i < len(group) - 1):
                    predicted = model((1 - level) * clean + level * noise, level)
                    loss = nn.functional.mse_loss(predicted, noise) / len(group)
                    fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        start = torch.randn(5, 6, generator=own)
        sample = start - model(start, torch.ones(5, 1))
    samples = fabric.all_gather(sample).flatten(0, 1)
    if fabric.is_global_zero:
        torch.save(samples, "samples.pt")
    fabric.save("model.ckpt", {"model": model, "optimizer": optimizer})
    fabric.print(samples.shape)


if __name__ == "__main__":
    main()
