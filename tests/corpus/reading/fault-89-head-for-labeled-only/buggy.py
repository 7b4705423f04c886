import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SemiSupervised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.decoder = nn.Linear(4, 8)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x, label):
        z = torch.relu(self.encoder(x))
        loss = nn.functional.mse_loss(self.decoder(z), x)
        known = label >= 0
        if known.sum() > 0:
            own = nn.functional.cross_entropy(self.classifier(z[known]), label[known], reduction="sum")
            loss = loss + own / len(label)
        return loss


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=g)
    label = torch.randint(-12, 3, (96,), generator=g).clamp(min=-1)
    data = TensorDataset(x, label)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(SemiSupervised())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            model(bx, by).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
