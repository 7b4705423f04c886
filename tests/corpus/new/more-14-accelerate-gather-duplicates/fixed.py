import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Intents(Dataset):
    """Bag of words of short requests, six intents."""

    def __init__(self, n, seed, vocab=40):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 6, (n,), generator=g)
        self.bow = torch.rand(n, vocab, generator=g)
        self.bow[torch.arange(n), self.labels * 3] += 0.4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input": self.bow[i], "labels": self.labels[i]}


def train_one_epoch(accelerator, model, loader, optimizer):
    model.train()
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["input"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits, count = 0, 0
    for batch in loader:
        predictions = model(batch["input"]).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        hits += (predictions == references).sum().item()
        count += references.numel()
    return hits / count, count


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_loader = DataLoader(Intents(192, 0), batch_size=12, shuffle=True)
    eval_loader = DataLoader(Intents(45, 1), batch_size=8)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for epoch in range(2):
        train_one_epoch(accelerator, model, train_loader, optimizer)
        acc, count = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: accuracy {acc:.4f} on {count} requests")
    accelerator.end_training()


if __name__ == "__main__":
    main()
