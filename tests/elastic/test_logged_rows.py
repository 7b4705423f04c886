"""All steps before a checkpoint are in the metrics file when the checkpoint is published."""

from pathlib import Path

import pytest
import torch

from samestep import Run, read_metrics


def rows_at_the_moment_of_saving(folder: str) -> list[int]:
    with Run(global_batch=4, folder=folder, precision="fp32") as run:
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = run.shard(torch.utils.data.TensorDataset(torch.ones(400, 1)), num_workers=0)
        checkpoint = run.checkpoint(f"{folder}/checkpoints", model=model, optimizer=optimizer, train=train)
        for epoch in train.epochs(1):
            for step in epoch:
                for (rows,) in step:
                    step.mean(model(rows)[:, 0]).backward()
                optimizer.step()
                optimizer.zero_grad()
        checkpoint.save()
        checkpoint.wait()
        # What a kill at this moment would leave.
        records = run.once(read_metrics, Path(folder) / "metrics.jsonl")
    return [int(record["step"]) for record in records if "train/loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_every_step_before_a_checkpoint_is_logged_when_the_checkpoint_is_published(ranks, tmp_path, size):
    for steps in ranks(size, rows_at_the_moment_of_saving, str(tmp_path / "out")):
        assert steps == list(range(100))
