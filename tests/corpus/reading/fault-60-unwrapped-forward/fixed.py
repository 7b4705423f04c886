import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x)


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            prediction = model(x)
            accelerator.backward(nn.functional.mse_loss(prediction, y))
            optimizer.step()


if __name__ == "__main__":
    main()
