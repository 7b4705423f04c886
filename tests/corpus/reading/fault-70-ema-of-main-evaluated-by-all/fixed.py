import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


class WeightAverage:
    def __init__(self, net, decay=0.9):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


@torch.no_grad()
def score(net, loader):
    wrong = torch.zeros(2)
    for x, y in loader:
        wrong[0] += ((net(x) > 0) != y.bool()).sum()
        wrong[1] += y.numel()
    dist.all_reduce(wrong)
    return (wrong[0] / wrong[1]).item()


def main():
    dist.init_process_group("gloo")
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=gen)
    y = (x[:, :1] > 0).float()
    train_set, test_set = TensorDataset(x[:160], y[:160]), TensorDataset(x[160:], y[160:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 10, sampler=sampler)
    test_loader = DataLoader(test_set, 10, sampler=DistributedSampler(test_set, shuffle=False))
    torch.manual_seed(1)
    raw = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    average = WeightAverage(raw)
    net = DistributedDataParallel(raw)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.follow(raw)
        error = score(average.net, test_loader)
        if is_main():
            print("error of the average", epoch, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
