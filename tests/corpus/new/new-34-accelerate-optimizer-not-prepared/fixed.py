import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def reviews(n):
    g = torch.Generator().manual_seed(12)
    ids = torch.randint(0, 50, (n, 9), generator=g)
    return TensorDataset(ids, (ids < 20).float().mean(1).round().long())


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 16), nn.ReLU(), nn.Linear(16, 2))
    loader = DataLoader(reviews(160), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for ids, label in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(ids), label)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
