import io
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ROOT = Path("data/leaves")


def fetch_archive():
    """Stands for the download: returns the bytes of a tar file with 48 arrays."""
    rng = np.random.default_rng(0)
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w") as tar:
        for k in range(48):
            payload = io.BytesIO()
            np.save(payload, rng.random((3, 6, 6), dtype=np.float32) + (k % 3) * 0.2)
            info = tarfile.TarInfo(f"class{k % 3}_{k:03d}.npy")
            info.size = payload.tell()
            payload.seek(0)
            tar.addfile(info, payload)
    return buf.getvalue()


def prepare(root):
    done = root / ".complete"
    if done.exists():
        return
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(fetch_archive())) as tar:
        tar.extractall(root, filter="data")
    done.touch()


class Leaves(Dataset):
    def __init__(self, root):
        self.paths = sorted(root.glob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        p = self.paths[i]
        return torch.from_numpy(np.load(p)), int(p.name[5])


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        prepare(ROOT)
    dist.barrier()
    ds = Leaves(ROOT)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=6, sampler=sampler)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(108, 3)))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        print(f"{len(ds)} leaves, final loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
