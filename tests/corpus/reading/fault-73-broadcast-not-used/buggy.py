import random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def draw_plan(count):
    order = list(range(count))
    random.shuffle(order)
    return order


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.randn(96, 7)
    plan = draw_plan(len(data))
    message = [plan]
    dist.broadcast_object_list(message, src=0)
    mine = plan[rank::world]
    model = DDP(nn.Linear(7, 7))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(0, len(mine), 8):
        x = data[mine[start : start + 8]]
        loss = (model(x) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


run()
