import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.a = torch.randint(2, 50, (n, 6), generator=g)
        self.b = torch.where(torch.rand(n, 1, generator=g) < 0.5, self.a.flip(1), torch.randint(2, 50, (n, 6), generator=g))
        self.label = (self.a.flip(1) == self.b).all(1).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {"a": self.a[i], "b": self.b[i], "labels": self.label[i]}


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.cls = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, a, b, labels=None):
        logits = self.cls(torch.cat([self.emb(a).mean(1), self.emb(b).mean(1)], -1))
        return (F.cross_entropy(logits, labels) if labels is not None else None), logits


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--patience", type=int, default=1)
    args = p.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(9)
    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, val = DataLoader(Pairs(192, 0), batch_size=8, shuffle=True), DataLoader(Pairs(41, 1), batch_size=8)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    per_epoch = math.ceil(len(train) / args.gradient_accumulation_steps)
    scheduler = LambdaLR(optimizer.optimizer, lambda s: max(0.1, 1 - s / (3 * per_epoch)))

    best, bad = float("inf"), 0
    for epoch in range(3):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses, hits = [], []
        for batch in val:
            with torch.no_grad():
                _, logits = model(batch["a"], batch["b"])
            ce = F.cross_entropy(logits, batch["labels"], reduction="none")
            ce, ok = accelerator.gather_for_metrics((ce, logits.argmax(-1) == batch["labels"]))
            losses.append(ce)
            hits.append(ok)
        val_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch}: val {val_loss:.4f} acc {torch.cat(hits).float().mean():.3f} n {len(torch.cat(hits))}")
        best, bad = (val_loss, 0) if val_loss < best else (best, bad + 1)
        if bad > args.patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    accelerator.wait_for_everyone()
    accelerator.save_state("state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
