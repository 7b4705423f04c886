import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


class Context:
    def __init__(self):
        self.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if self.distributed:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.distributed else 0
        self.world = dist.get_world_size() if self.distributed else 1

    @property
    def is_main(self):
        return self.rank == 0

    def mean(self, value, count):
        pair = torch.tensor([value, count], dtype=torch.float64)
        if self.distributed:
            dist.all_reduce(pair)
        return (pair[0] / pair[1]).item()

    def barrier(self):
        if self.distributed:
            dist.barrier()


class Experiment:
    def __init__(self, args):
        self.args = args
        self.context = Context()
        torch.manual_seed(args.seed)
        x = torch.randn(80, 6, generator=torch.Generator().manual_seed(args.seed))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        self.sampler = DistributedSampler(data) if self.context.distributed else RandomSampler(data)
        self.loader = DataLoader(data, batch_size=args.batch // self.context.world, sampler=self.sampler)
        self.model = nn.Linear(6, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if args.resume and os.path.exists(args.resume):
            self.model.load_state_dict(torch.load(args.resume, map_location="cpu"))
        self.wrapped = DistributedDataParallel(self.model) if self.context.distributed else self.model

    def epoch(self, number):
        if self.context.distributed:
            self.sampler.set_epoch(number)
        total, count = 0.0, 0
        for index, (x, y) in enumerate(self.loader):
            step_now = (index + 1) % 2 == 0 or index + 1 == len(self.loader)
            hold = self.wrapped.no_sync if self.context.distributed and not step_now else nullcontext
            with hold():
                loss = F.mse_loss(self.wrapped(x), y)
                (loss / 2).backward()
            if step_now:
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.item() * len(x)
            count += len(x)
        return self.context.mean(total, count)

    def run(self):
        for number in range(self.args.epochs):
            value = self.epoch(number)
            if self.context.is_main:
                print(f"{number}: {value:.4f}")
                torch.save(self.model.state_dict(), "last.pt")
            self.context.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", default="")
    Experiment(parser.parse_args()).run()
