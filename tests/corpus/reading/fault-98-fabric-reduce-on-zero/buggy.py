import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    x = torch.randn(64, 4)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x), 8, shuffle=True))
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(2):
        for (b,) in loader:
            loss = (model(b) - b).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        if fabric.is_global_zero:
            print("loss", fabric.all_reduce(loss.detach()).item())


if __name__ == "__main__":
    main()
