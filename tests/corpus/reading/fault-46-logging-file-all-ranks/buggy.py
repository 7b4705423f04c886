import logging
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("train")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO)
    model = DDP(nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        g = torch.Generator().manual_seed(step * 7 + rank)
        opt.zero_grad()
        model(torch.randn(4, 2, generator=g)).pow(2).mean().backward()
        opt.step()
        log.info("step %d", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
