import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 24
EPOCHS = 2


class Captions(Dataset):
    """(image features, token ids) pairs that share a latent factor."""

    def __init__(self, n=192):
        g = torch.Generator().manual_seed(77)
        z = torch.randn(n, 6, generator=g)
        self.img = z @ torch.randn(6, 20, generator=g) + 0.1 * torch.randn(n, 20, generator=g)
        self.txt = ((z @ torch.randn(6, 9, generator=g)).clamp(-3, 3) * 5 + 15).long()

    def __len__(self):
        return len(self.img)

    def __getitem__(self, k):
        return self.img[k], self.txt[k]


class TwoTower(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, dim))
        self.tokens = nn.Embedding(31, dim)
        self.text_proj = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, img, txt):
        a = F.normalize(self.visual(img), dim=-1)
        b = F.normalize(self.text_proj(self.tokens(txt).mean(1)), dim=-1)
        return a, b, self.logit_scale.exp()


def gather_features(feat):
    """Concatenate the features of all ranks, in rank order."""
    world = dist.get_world_size()
    if world == 1:
        return feat
    bufs = [torch.empty_like(feat) for _ in range(world)]
    dist.all_gather(bufs, feat)
    return torch.cat(bufs, dim=0)


def clip_loss(a, b, scale):
    all_a, all_b = gather_features(a), gather_features(b)
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    loss_i = F.cross_entropy(scale * a @ all_b.t(), target)
    loss_t = F.cross_entropy(scale * b @ all_a.t(), target)
    return 0.5 * (loss_i + loss_t)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = Captions()
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(TwoTower())
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for img, txt in loader:
            loss = clip_loss(*model(img, txt))
            optim.zero_grad()
            loss.backward()
            optim.step()
        if rank == 0:
            print(f"epoch {epoch} contrastive loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
