import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def epoch_of(model, loader, optimizer, scheduler, scaler, accumulate):
    batches = len(loader)
    for index, (x, y) in enumerate(loader):
        group = min(accumulate, batches - index // accumulate * accumulate)
        last = (index + 1) % accumulate == 0 or index + 1 == batches
        context = contextlib.nullcontext() if last else model.no_sync()
        with context:
            with torch.autocast("cpu", enabled=False):
                loss = nn.functional.mse_loss(model(x), y) / group
            scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()


def main():
    dist.init_process_group("gloo")
    x = torch.randn(176, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.flip(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accumulate = 4
    updates = -(-len(loader) // accumulate) * 3
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=updates)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epoch_of(model, loader, optimizer, scheduler, scaler, accumulate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
