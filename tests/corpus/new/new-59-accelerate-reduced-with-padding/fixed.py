import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(115, 6, generator=g)
    y = (x[:, 0] > 0.3).long()
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, val_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8)
    )
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for inputs, targets in val_loader:
                guess = model(inputs).argmax(1)
                guess, targets = accelerator.gather_for_metrics((guess, targets))
                correct += (guess == targets).sum()
        accelerator.print(f"accuracy {correct.item() / len(val):.3f}")
    accelerator.end_training()


main()
