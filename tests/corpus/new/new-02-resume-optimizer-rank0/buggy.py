import argparse

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sines(Dataset):
    def __init__(self, n=144):
        gen = torch.Generator().manual_seed(12)
        self.t = torch.rand(n, 6, generator=gen) * 6
        self.v = torch.sin(self.t).sum(-1, keepdim=True)

    def __len__(self):
        return self.t.size(0)

    def __getitem__(self, i):
        return self.t[i], self.v[i]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.SiLU(), nn.Linear(40, 1))


def save_checkpoint(path, model, opt, epoch):
    if dist.get_rank() == 0:
        torch.save({"net": model.state_dict(), "optim": opt.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def load_checkpoint(path, model, opt):
    ckpt = torch.load(path, map_location="cpu")
    model.load_state_dict(ckpt["net"])
    opt.load_state_dict(ckpt["optim"])


def job(path, epochs, done=0):
    """Train from epoch `done` to `epochs`; continues from the checkpoint if there is something done."""
    rank = dist.get_rank()
    model = make_model()
    opt = optim.Adam(model.parameters(), lr=4e-3)
    if done and rank == 0:
        # no need to hammer the file system from every process, DDP sends the weights around
        load_checkpoint(path, model, opt)
    ddp = DistributedDataParallel(model)
    data = Sines()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for t, v in loader:
            loss = nn.functional.huber_loss(ddp(t), v)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch}: {total / len(loader):.4f}", flush=True)
    save_checkpoint(path, model, opt, epochs)


def main(opts):
    dist.init_process_group("gloo")
    job(opts.resume, 2)           # preempted here ...
    job(opts.resume, 4, done=2)   # ... and started again
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--resume", default="last.ckpt")
    main(ap.parse_args())
