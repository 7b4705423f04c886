import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(accelerator, model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        with torch.no_grad():
            losses = nn.functional.cross_entropy(model(x), y, reduction="none", ignore_index=-100)
        total += losses.sum()
        count += (y != -100).sum()
    mean = accelerator.reduce(total / count, reduction="mean")
    return mean.item()


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (64,), generator=g)
    labels[::5] = -100
    train = TensorDataset(torch.randn(64, 4, generator=g), labels)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, val = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=8, shuffle=True), DataLoader(train, batch_size=8)
    )
    for epoch in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y, ignore_index=-100))
            optimizer.step()
        loss = evaluate(accelerator, model, val)
        accelerator.print(f"{epoch}: {loss:.4f}")


if __name__ == "__main__":
    main()
