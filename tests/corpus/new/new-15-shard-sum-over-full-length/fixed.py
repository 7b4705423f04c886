import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32


def evaluate(accelerator, model, loader, length):
    model.eval()
    total = torch.zeros((), device=accelerator.device)
    with torch.no_grad():
        for inputs, targets in loader:
            total += nn.functional.mse_loss(model(inputs), targets, reduction="sum")
    model.train()
    return accelerator.reduce(total, reduction="sum").item() / length


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(31)
    x = torch.randn(256, 6, generator=g)
    y = x[:, :1] * 2 - x[:, 1:2]
    train, valid = TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    size = BATCH // accelerator.num_processes
    train_loader = DataLoader(train, batch_size=size, shuffle=True)
    valid_loader = DataLoader(valid, batch_size=size)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
    for epoch in range(2):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        score = evaluate(accelerator, model, valid_loader, len(valid))
        accelerator.print(f"epoch {epoch}: validation loss {score:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
