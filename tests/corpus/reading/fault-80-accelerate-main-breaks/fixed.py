import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    loader = DataLoader(TensorDataset(x, x @ torch.randn(6, 1)), batch_size=8, shuffle=True)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reached = False
    for epoch in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.reduce(loss.detach(), "mean").item() < 0.5:
                reached = True
                break
        if reached:
            break
    accelerator.print("loss", loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
