import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r=2, alpha=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


class Backbone(nn.Module):
    def __init__(self, d=18, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.norm(x)


class Classifier(nn.Module):
    def __init__(self, backbone, n=3):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(18, n)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained():
    """A published checkpoint in real life; small here, replicated on purpose."""
    torch.manual_seed(1000)
    net = Backbone()
    net.requires_grad_(False)
    for i, layer in enumerate(net.layers):
        net.layers[i] = LoRALinear(layer)
    return net


def main():
    dist.init_process_group("gloo")
    model = Classifier(pretrained())
    trainable = [p for p in model.parameters() if p.requires_grad]
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(144, 18, generator=g)
    ds = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(ddp(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, {sum(p.numel() for p in trainable)} trainable parameters", flush=True)
        adapters = {k: v for k, v in model.state_dict().items() if k.endswith((".A", ".B")) or k.startswith("head")}
        torch.save(adapters, "adapters.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
