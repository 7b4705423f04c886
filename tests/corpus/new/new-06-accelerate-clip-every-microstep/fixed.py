import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class ToyLatents(Dataset):
    def __init__(self, n=128, ch=3, hw=6, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, ch, hw, hw, generator=g)
        self.eps = torch.randn(n, ch, hw, hw, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"pixel_values": self.x[i] + 0.5 * self.eps[i], "noise": 20.0 * self.eps[i]}


class ConvDenoiser(nn.Module):
    def __init__(self, ch=3, hidden=10):
        super().__init__()
        self.conv_in = nn.Conv2d(ch, hidden, 3, padding=1)
        self.norm = nn.GroupNorm(2, hidden)
        self.conv_out = nn.Conv2d(hidden, ch, 3, padding=1)

    def forward(self, x):
        return self.conv_out(F.silu(self.norm(self.conv_in(x))))


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--train_batch_size", type=int, default=8)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--learning_rate", type=float, default=1e-3)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--num_epochs", type=int, default=2)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(21)
    model = ConvDenoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    train_dataloader = DataLoader(ToyLatents(), shuffle=True, batch_size=args.train_batch_size)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)

    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                pred = model(batch["pixel_values"])
                loss = F.mse_loss(pred, batch["noise"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
        accelerator.print(f"epoch {epoch} global_step {global_step} loss {loss.detach().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
