import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None


def build(args):
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, opt, CosineAnnealingWarmRestarts(opt, T_0=2)


def train(args, until, writer):
    """Trains up to epoch `until`, continuing from the checkpoint if there is one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, opt, sched = build(args)
    start = 0
    if os.path.exists(args.ckpt):
        ck = torch.load(args.ckpt, map_location="cpu")
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        start = ck["epoch"] + 1
    model = DDP(net)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(144, 6, generator=g)
    ds = TensorDataset(x, (x[:, :2] * x[:, 2:4]).sum(1, keepdim=True))
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank)
    loader = DataLoader(ds, batch_size=12, sampler=sampler)
    for epoch in range(start, until):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        handle = dist.all_reduce(total, async_op=True)
        if rank == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": epoch}, args.ckpt)
        handle.wait()
        if writer is not None:
            writer.add_scalar("train/mse", total.item() / (world * len(loader)), epoch)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / (world * len(loader)):.4f} lr {sched.get_last_lr()[0]:.3f}", flush=True)
    dist.barrier()  # the checkpoint is complete before anybody reads it


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ckpt", default="resume.pt")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    writer = SummaryWriter("tb") if SummaryWriter is not None and dist.get_rank() == 0 else None
    if dist.get_rank() == 0 and os.path.exists(args.ckpt):
        os.remove(args.ckpt)
    dist.barrier()
    train(args, 2, writer)  # first job
    train(args, 4, writer)  # restarted job
    if writer is not None:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
