import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def render_frames(folder, n=64):
    """Makes the data set if it is not there yet."""
    os.makedirs(folder, exist_ok=True)
    g = torch.Generator().manual_seed(55)
    for k in range(n):
        frame = torch.rand(2, 8, 8, generator=g)
        torch.save({"id": k, "frame": frame, "flow": frame[1].mean() - frame[0].mean()}, os.path.join(folder, f"clip_{k * 37 % n:03d}.pt"))


class ClipFolder(Dataset):
    def __init__(self, folder):
        self.files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".pt")]
        if not self.files:
            raise RuntimeError(f"no clips in {folder}")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        item = torch.load(self.files[index])
        return item["frame"], item["flow"]


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(nn.Conv2d(2, 8, 3, stride=2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(8 * 9, 1))

    def forward(self, frame):
        return self.stack(frame).squeeze(-1)


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        render_frames(folder)
    dist.barrier()

    clips = ClipFolder(folder)
    sampler = DistributedSampler(clips, shuffle=True, seed=3)
    loader = DataLoader(clips, batch_size=8, sampler=sampler)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(FlowNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for frame, flow in loader:
            optimizer.zero_grad()
            loss = (model(frame) - flow).square().mean()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} mse {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "clips")
