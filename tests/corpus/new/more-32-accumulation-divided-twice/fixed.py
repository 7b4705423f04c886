import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Passages(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(26)
        self.q = torch.randn(n, 12, generator=g)
        self.p = self.q.roll(1, dims=1) + 0.2 * torch.randn(n, 12, generator=g)

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return {"query": self.q[i], "passage": self.p[i]}


class Regress(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 12))

    def forward(self, query, passage):
        return 1 - F.cosine_similarity(self.net(query), passage).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_batch_size", type=int, default=5)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(1)
    model = Regress()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(Passages(), batch_size=args.per_device_batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            updates += int(accelerator.sync_gradients)
        accelerator.print(f"epoch {epoch}: {updates} updates, last loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
