import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    correct, total = 0, 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    model.train()
    counts = fabric.all_reduce(torch.tensor([correct, total]), reduce_op="sum")
    return (counts[0] / counts[1]).item()


def train(fabric):
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader, val = fabric.setup_dataloaders(
        DataLoader(data(96, 0), batch_size=8, shuffle=True), DataLoader(data(40, 1), batch_size=8)
    )
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        accuracy = validate(fabric, model, val)
        fabric.print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch(train)
