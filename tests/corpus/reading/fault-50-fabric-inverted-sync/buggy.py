import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            is_accumulating = (i + 1) % STEPS == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(nn.functional.mse_loss(model(x), y) / STEPS)
            if (i + 1) % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
