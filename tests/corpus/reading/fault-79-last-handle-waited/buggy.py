import torch
import torch.distributed as dist
from torch import nn


class GradientAverager:
    def __init__(self, model):
        self.model = model
        self.world = dist.get_world_size()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)

    def average(self):
        handle = None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.world)
                handle = dist.all_reduce(parameter.grad, async_op=True)
        handle.wait()


def main():
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    averager = GradientAverager(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(8):
        x = torch.randn(16, 4, generator=gen)
        loss = (model(x) - x.prod(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        averager.average()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
