import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n=192):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def train_batches(accelerator, model, optimizer, loader, stop_at=None):
    done = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if stop_at is not None and done == stop_at:
            break
    return done, loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="state")
    parser.add_argument("--interrupt_after", type=int, default=4)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(11)
    loader = DataLoader(make_data(), batch_size=8, shuffle=False)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # first job of the queue: ends at its time limit, inside of the first epoch
    done, _ = train_batches(accelerator, model, optimizer, loader, stop_at=args.interrupt_after)
    accelerator.save_state(args.output_dir)
    accelerator.wait_for_everyone()

    # next job: goes on from there
    accelerator.load_state(args.output_dir)
    skip = done
    rest = accelerator.skip_first_batches(loader, skip)
    _, loss = train_batches(accelerator, model, optimizer, rest)
    loss = accelerator.reduce(loss, "mean")
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
