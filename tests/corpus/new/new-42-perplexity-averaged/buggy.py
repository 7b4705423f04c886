import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def corpus(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 24, (n, 1), generator=g)
    ids = (start + torch.arange(13)) % 24
    if noise:
        hard = (torch.arange(n) // 8) % 2 == 1
        ids[hard] = torch.randint(0, 24, (int(hard.sum()), 13), generator=g)
    return TensorDataset(ids)


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, ids):
        logits = self.net(ids[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, 24), ids[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses = torch.stack([model(ids) for (ids,) in loader])
    model.train()
    ppl = torch.tensor(math.exp(losses.mean()))
    return accelerator.gather(ppl).mean().item()


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(corpus(128, 0, False), batch_size=8, shuffle=True)
    valid = DataLoader(corpus(32, 1, True), batch_size=8)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for epoch in range(3):
        for (ids,) in train:
            accelerator.backward(model(ids))
            optimizer.step()
            optimizer.zero_grad()
        ppl = evaluate(accelerator, model, valid)
        accelerator.print(f"epoch {epoch}: perplexity {ppl:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
