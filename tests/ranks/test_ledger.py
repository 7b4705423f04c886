"""The ledgers of real runs have no faults after failures, resumes and changes of world size."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run
from samestep.cli.audit_command import command
from samestep.data.audit import audit


class SimulatedFailure(Exception):
    pass


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(17))


def train(folder, epochs, state=None, fail_at=None, save_at=None, stream=False):
    """Train, save the position after `save_at`, fail inside step `fail_at`; return the position to resume from."""
    saved = state
    try:
        with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
            data = (
                run.stream(Count())
                if stream
                else run.shard(TensorDataset(torch.arange(23.0)), shuffle=True, micro_batch=2)
            )
            test = run.shard(TensorDataset(torch.arange(7.0)))
            if state is not None:
                data.load_state_dict(state)
            for epoch in data.epochs(epochs):
                for step in epoch:
                    for _ in step:
                        if step.number == fail_at:
                            raise SimulatedFailure
                    if step.number == save_at:
                        saved = data.state_dict()
                run.mean(x for (x,) in test)
    except SimulatedFailure:
        import gc

        import torch.distributed as dist

        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    return saved


@pytest.mark.parametrize("stream", [False, True])
def test_every_sample_counts_once_after_failures_and_changes_of_world_size(ranks, tmp_path, stream):
    state = ranks(2, train, tmp_path, 3, None, 5, 3, stream)[0]  # steps 4 and 5 are lost and repeated
    state = ranks(3, train, tmp_path, 3, state, 9, 7, stream)[0]
    ranks(1, train, tmp_path, 3, state, None, None, stream)
    report = audit(tmp_path)
    assert report.exactly_once
    trained = next(shard for shard in report.shards if shard.name.startswith("stream" if stream else "shard-0"))
    assert [(epoch.number, epoch.samples) for epoch in trained.epochs] == [(e, 17 if stream else 23) for e in range(3)]
    assert [each.world_size for each in trained.generations] == [2, 3, 1]
    answer = CliRunner().invoke(command, [str(tmp_path), "--json"])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["exactly_once"] is True


def test_a_step_that_the_loop_skipped_is_a_fault(ranks, tmp_path):
    ranks(2, skip_a_step, tmp_path)
    answer = CliRunner().invoke(command, [str(tmp_path)])
    assert answer.exit_code == 1
    assert "step 1" in answer.output
    assert not audit(tmp_path).exactly_once


def skip_a_step(folder):
    with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
        data = run.shard(TensorDataset(torch.arange(23.0)), shuffle=True)
        for epoch in data.epochs(1):
            for step in epoch:
                if step.number == 1:
                    continue  # no sample of it is trained
                for _ in step:
                    pass
