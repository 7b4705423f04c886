import os
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def resume(accelerator, model, path):
    if os.path.exists(path):
        accelerator.unwrap_model(model).load_state_dict(torch.load(path, map_location="cpu"))


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    resume(accelerator, model, "pretrained.pt")
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    main()
