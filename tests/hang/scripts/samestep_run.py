"""The same training with samestep."""

import sys

import torch
from faults import BATCH, TIMEOUT, Rows, disturb, meet, num_workers, rank

from samestep import Run

fault = sys.argv[1]
meet()
with Run(global_batch=2 * BATCH, folder="out", start_timeout=120, step_timeout=TIMEOUT) as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shard = run.shard(Rows(fault), shuffle=False, num_workers=num_workers(fault))
    for epoch in shard.epochs(1):
        for step in epoch:
            disturb(fault, step.number)
            if fault == "rank_0":
                run.barrier()  # waits: rank_0
            for rows in step:
                step.mean(model(rows).square().mean(-1)).backward()  # waits
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": step.loss})
    print(f"rank {rank()} is done")
