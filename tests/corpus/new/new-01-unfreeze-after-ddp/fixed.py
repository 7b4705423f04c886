"""Two stage fine-tuning: train the head first, then everything with a smaller learning rate."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FineTuner(nn.Module):
    def __init__(self, n_classes=5):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(4, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(12, n_classes)

    def forward(self, x):
        return self.head(self.backbone(x).amax(dim=-1))


def freeze(module):
    for p in module.parameters():
        p.requires_grad_(False)


def unfreeze(module):
    for p in module.parameters():
        p.requires_grad_(True)


def ecg_windows(n=160, length=24):
    g = torch.Generator().manual_seed(8)
    sig = torch.randn(n, 4, length, generator=g)
    lab = (sig.abs().amax(dim=(1, 2)) * 1.7).long() % 5
    return TensorDataset(sig, lab)


def run_stage(net, loader, sampler, params, lr, epochs, first_epoch):
    opt = torch.optim.AdamW(params, lr=lr)
    for epoch in range(first_epoch, first_epoch + epochs):
        sampler.set_epoch(epoch)
        for sig, lab in loader:
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(sig), lab)
            loss.backward()
            opt.step()
    return loss.item()


def main():
    dist.init_process_group(backend="gloo")
    data = ecg_windows()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    torch.manual_seed(3)
    model = FineTuner()
    freeze(model.backbone)
    net = DDP(model)
    loss = run_stage(net, loader, sampler, model.head.parameters(), 1e-2, epochs=1, first_epoch=0)
    if dist.get_rank() == 0:
        print("stage 1 (head only):", round(loss, 4), flush=True)

    # stage 2: end to end
    unfreeze(model.backbone)
    del net
    net = DDP(model)
    loss = run_stage(net, loader, sampler, model.parameters(), 1e-3, epochs=2, first_epoch=1)
    if dist.get_rank() == 0:
        print("stage 2 (all layers):", round(loss, 4), flush=True)
        torch.save(model.state_dict(), os.path.join(os.getcwd(), "finetuned.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
