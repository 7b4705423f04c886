import os

import torch
import torch.distributed as dist


def rank():
    return int(os.environ.get("RANK", "0"))


def is_main():
    return rank() == 0


def any_rank(flag):
    value = torch.tensor(float(flag))
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def weighted_mean(total, count):
    both = torch.tensor([float(total), float(count)], dtype=torch.float64)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(both)
    return (both[0] / both[1]).item()
