"""The same training with Accelerate, without samestep."""

import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from faults import BATCH, DEVICE, TIMEOUT, Rows, disturb, meet, num_workers, rank, share_gpu
from torch.utils.data import DataLoader

fault = sys.argv[1]
share_gpu()
meet()
accelerator = Accelerator(
    cpu=DEVICE == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT))]
)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Rows(fault), BATCH, num_workers=num_workers(fault))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, rows in enumerate(loader):
    disturb(fault, step)
    if fault == "rank_0":
        accelerator.wait_for_everyone()  # waits: rank_0
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    accelerator.backward(loss)  # waits
    optimizer.step()
print(f"rank {rank()} is done")
accelerator.end_training()
