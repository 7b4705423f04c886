import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def forward(self, features, labels=None):
        logits = self.head(self.body(features))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return loss, logits


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x[:, :4].argmax(1))


def validate(accelerator, model, loader):
    model.eval()
    counts = torch.zeros(2, device=accelerator.device)
    with torch.inference_mode():
        for x, y in loader:
            _, logits = model(x)
            counts[0] += (logits.argmax(-1) == y).sum()
            counts[1] += len(y)
    counts = accelerator.reduce(counts, reduction="sum")
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train = DataLoader(data(160, 1), batch_size=10, shuffle=True)
    val = DataLoader(data(64, 2), batch_size=16)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    for epoch in range(2):
        for x, y in train:
            loss, _ = model(x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        acc = validate(accelerator, model, val)
        accelerator.print(f"epoch {epoch}: accuracy {acc:.4f}")


if __name__ == "__main__":
    main()
