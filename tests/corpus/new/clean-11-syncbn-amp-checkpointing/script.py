import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class SegNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1))
        self.stage = Stage(width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x = self.stem(x)
        x = x + checkpoint(self.mid, x, use_reentrant=False)  # saves activation memory
        return self.out(self.stage(x))


def setup():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--amp", action="store_true", default=torch.cuda.is_available())
    args = ap.parse_args()
    device = setup()
    torch.manual_seed(0)
    model = SegNet().to(device)
    if device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)

    g = torch.Generator().manual_seed(11)
    img = torch.rand(64, 3, 10, 10, generator=g)
    ds = TensorDataset(img, (img.mean(1, keepdim=True) > 0.5).float())
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, pin_memory=device.type == "cuda")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device.type, enabled=args.amp):
                loss = F.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} bce {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
