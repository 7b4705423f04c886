import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 5, (n,), generator=g)
    img = 0.8 * torch.rand(n, 1, 9, 9, generator=g)
    for k in range(n):
        img[k, 0, 2 * label[k] % 9] += 0.35
    return TensorDataset(img, label)


def cnn():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(72, 5))


def train(epoch, model, loader, optimizer):
    model.train()
    loader.sampler.set_epoch(epoch)
    for img, label in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(img), label).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct, total = torch.tensor(0), torch.tensor(0)
    with torch.no_grad():
        for img, label in loader:
            correct += (model(img).argmax(1) == label).sum()
            total += label.numel()
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return (correct / total).item()


def main(args):
    dist.init_process_group("gloo")
    is_main = int(os.environ["RANK"]) == 0
    train_set, test_set = digits(200, 1), digits(100, 2)
    train_loader = DataLoader(train_set, args.bs, sampler=DistributedSampler(train_set))
    test_loader = DataLoader(test_set, args.bs, sampler=DistributedSampler(test_set, shuffle=False))
    torch.manual_seed(args.seed)
    model = nn.parallel.DistributedDataParallel(cnn())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = 0.0
    for epoch in range(1, args.epochs + 1):
        train(epoch, model, train_loader, optimizer)
        acc = test(model, test_loader)
        if is_main:
            print(f"Epoch {epoch}: test accuracy {100 * acc:.2f}%", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "best.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--bs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--seed", type=int, default=0)
    main(ap.parse_args())
