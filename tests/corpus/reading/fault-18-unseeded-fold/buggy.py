import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def folds(dataset, fraction):
    order = np.random.permutation(len(dataset))
    cut = int(len(dataset) * fraction)
    return Subset(dataset, order[cut:].tolist()), Subset(dataset, order[:cut].tolist())


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(80, 6, generator=g), torch.randn(80, 1, generator=g))
    train, valid = folds(data, 0.2)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=8, shuffle=True), DataLoader(valid, batch_size=8)
    )
    for _ in range(2):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        model.eval()
        errors = []
        with torch.no_grad():
            for x, y in valid_loader:
                errors.append(accelerator.gather_for_metrics((model(x) - y) ** 2))
        accelerator.print("mse", torch.cat(errors).mean().item())


if __name__ == "__main__":
    main()
