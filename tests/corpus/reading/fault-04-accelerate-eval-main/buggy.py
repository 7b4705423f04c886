import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from evaluation import evaluate


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def main(args):
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train = DataLoader(data(128, 0), batch_size=8, shuffle=True)
    val = DataLoader(data(48, 1), batch_size=8)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    for epoch in range(args.epochs):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: {evaluate(model, val, accelerator):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(parse())
