import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    val = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    model = nn.Linear(4, 3)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    metric = MulticlassAccuracy(num_classes=3)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        with torch.no_grad():
            for x, y in val:
                metric.update(model(x), y)
        value = metric.compute()
        metric.reset()
        fabric.print(f"epoch {epoch}: {value:.3f}")


if __name__ == "__main__":
    main()
