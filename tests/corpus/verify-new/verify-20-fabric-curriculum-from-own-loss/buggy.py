import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(10)
        self.x = torch.randn(n, 20, generator=g)
        self.y = (self.x[:, :10].sum(1) > self.x[:, 10:].sum(1)).float()
        self.blur = 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return (1 - self.blur) * x + self.blur * x.roll(1), self.y[i]


class Curriculum:
    """Makes the data harder, the faster the lower the loss is."""

    def __init__(self, dataset, rate=0.2):
        self.dataset, self.rate = dataset, rate

    def update(self, loss):
        self.dataset.blur = min(0.9, self.dataset.blur + self.rate * max(0.0, 1.0 - loss))


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(2)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    data = Shapes()
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    curriculum = Curriculum(data)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        total, n = torch.zeros(()), 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
            n += 1
        mean = total / n
        curriculum.update(mean.item())
        fabric.print(f"epoch {epoch} blur {data.blur:.3f}")


if __name__ == "__main__":
    main()
