import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.classify = nn.Linear(32, 3)
        self.reconstruct = nn.Linear(32, 6)

    def forward(self, x):
        h = self.trunk(x)
        return self.classify(h), self.reconstruct(h)


def average_gradients(module):
    world = dist.get_world_size()
    for p in module.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(123)
    net = TwoHeads()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(120, 6, generator=g)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            logits, copy = net(x)
            nn.functional.cross_entropy(logits, y).backward(retain_graph=True)
            average_gradients(net)
            (0.5 * nn.functional.mse_loss(copy, x)).backward()
            opt.step()
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
