import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PRETRAINED = "pretrained_backbone.pth"


def init():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    return torch.device(f"cuda:{local_rank}" if use_cuda else "cpu")


def backbone():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32))


def ensure_pretrained(device):
    """The checkpoint of an earlier run, saved from cuda:0."""
    if dist.get_rank() == 0 and not os.path.exists(PRETRAINED):
        torch.manual_seed(0)
        torch.save({"state_dict": backbone().to(device).state_dict(), "arch": "mlp-64"}, PRETRAINED)
    dist.barrier()


class Finetune(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.head = nn.Linear(32, 4)
        ckpt = torch.load(PRETRAINED, map_location="cpu")
        self.backbone.load_state_dict(ckpt["state_dict"])

    def forward(self, x):
        return self.head(F.relu(self.backbone(x)))


def main():
    device = init()
    ensure_pretrained(device)
    torch.manual_seed(1)
    model = DDP(Finetune().to(device))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(128, 20, generator=g)
    ds = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(ds)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in DataLoader(ds, batch_size=16, sampler=sampler):
            loss = F.cross_entropy(model(xb.to(device)), yb.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
