import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectrogram(Dataset):
    def __init__(self, n=160, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.spec = torch.rand(n, 8, 10, generator=g)
        self.clean = self.spec.clone()
        self.clean[self.spec < 0.3] = 0

    def __len__(self):
        return len(self.spec)

    def __getitem__(self, k):
        return self.spec[k], self.clean[k]


class Mask(nn.Module):
    def __init__(self, bins=8, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(bins, hidden, 3, padding=1), nn.PReLU(), nn.Conv1d(hidden, bins, 1), nn.Sigmoid())

    def forward(self, spec):
        return spec * self.net(spec)


def get_loader(args):
    return DataLoader(Spectrogram(args["n"]), batch_size=args["batch_size"], shuffle=True, drop_last=True)


def main():
    args = {"n": 160, "batch_size": 10, "epochs": 2, "lr": 4e-3, "seed": 11}
    accelerator = Accelerator(cpu=True)
    set_seed(args["seed"])
    model = Mask()
    opt = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)
    loader = get_loader(args)
    model, opt = accelerator.prepare(model, opt)
    for epoch in range(args["epochs"]):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for spec, clean in loader:
            spec, clean = spec.to(accelerator.device), clean.to(accelerator.device)
            loss = nn.functional.l1_loss(model(spec), clean)
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
            total += loss.detach()
        sched.step()
        total = accelerator.reduce(total, reduction="mean") / len(loader)
        accelerator.print(f"epoch {epoch}: l1 {total.item():.4f} in {len(loader)} batches")
    accelerator.end_training()


if __name__ == "__main__":
    main()
