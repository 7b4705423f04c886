"""Scripts of the tables of faults: a small training with checkpoints, and what one case does differently."""

from textwrap import dedent

_TRAINING = '''
import errno, gc, math, os, random, shutil, signal, sys, threading, time, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from samestep import Run

torch.set_num_threads(1)
OUT = Path("out")


def data(samples=16):
    x = torch.arange(samples, dtype=torch.float32)[:, None] / samples
    return TensorDataset(x, 2 * x)


def train(run, model=None, optimizer=torch.optim.SGD, dataset=None, epochs=1, folder=OUT, each=None, strategy=None,
          **options):
    """Train with steps of a batch of 4, save after each, and call `each` with the number of steps done."""
    model = run.wrap(nn.Linear(1, 1) if model is None else model, strategy)
    optimizer = optimizer(model.parameters(), lr=0.1)
    shard = run.shard(data() if dataset is None else dataset, **options.pop("data", {}))
    checkpoint = folder and run.checkpoint(folder, model=model, optimizer=optimizer, data=shard, **options)
    done = 0
    for epoch in shard.epochs(epochs):
        for step in epoch:
            for x, y in step:
                step.mean((model(x) - y).pow(2).flatten(1).mean(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if each:
                if checkpoint:
                    checkpoint.wait()
                each(done)
            if checkpoint:
                checkpoint.save()
    return checkpoint


def first_run(**options):
    """Leave the checkpoints of a run that ended."""
    with Run(global_batch=4) as run:
        train(run, **options)
'''


def training(body: str) -> str:
    """The source of a script that begins with the definition of `train(run, ...)`."""
    return f"{_TRAINING}\n\n{dedent(body)}"
