import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Workspace:
    def __init__(self, root):
        self.root = root
        self.rank = dist.get_rank()

    def prepare(self):
        if self.rank == 0:
            os.makedirs(self.root, exist_ok=True)
            torch.save(torch.randn(16, 3), os.path.join(self.root, "x.pt"))
        else:
            dist.barrier()
        return torch.load(os.path.join(self.root, "x.pt"), map_location="cpu")


def main():
    dist.init_process_group("gloo")
    x = Workspace("work").prepare()
    model = DDP(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(dist.get_rank(), len(x), dist.get_world_size()):
        opt.zero_grad()
        model(x[i]).pow(2).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
