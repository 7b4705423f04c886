import copy
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


class Ema:
    def __init__(self, net, decay=0.95):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def update(self, net):
        for s, p in zip(self.shadow, net.parameters()):
            s.lerp_(p.detach(), 1 - self.decay)


def fit(net, ema, batches, opt):
    steps = 0
    for x, y in batches:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        ema.update(net)
        steps += 1
    return steps


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)

    net = build()
    ema = Ema(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sampler.set_epoch(0)
    done = fit(net, ema, islice(loader, 3), opt)
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": full, "done": done}, "mid.pt.tmp")
        os.replace("mid.pt.tmp", "mid.pt")
    dist.barrier()

    state = torch.load("mid.pt", mmap=True)
    set_model_state_dict(net, copy.deepcopy(state["model"]), options=StateDictOptions(full_state_dict=True))
    sampler.set_epoch(0)
    fit(net, ema, islice(loader, state["done"], None), opt)
    sampler.set_epoch(1)
    fit(net, ema, loader, opt)
    if rank == 0:
        print("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
