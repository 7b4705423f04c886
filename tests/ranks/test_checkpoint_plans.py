"""Later checkpoints reuse the plan of the first one, as long as no rank has another layout of its tensors."""

from unittest import mock

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.checkpoint import tensor_storage
from samestep.checkpoint.tensor_storage import HostStaging
from samestep.errors import CheckpointError
from tests.ranks.models import Mlp


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def fill(model, optimizer, value):
    """Give every weight and moment another value."""
    for number, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.fill_(value + number)
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, -value - number)}


def save_three_times(folder, strategy):
    """Save before and after the optimizer has a state, and again; return how often DCP planned, after each save."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model = run.wrap(Mlp(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, keep=9)
        counts = []
        with mock.patch.object(tensor_storage.dcp, "save", wraps=tensor_storage.dcp.save) as plan:
            for step in range(4):
                if step:
                    fill(model, optimizer, 100.0 * step)
                torch.rand(step + 1)  # another state of the generators
                checkpoint.save(step=step)
                checkpoint.wait()
                counts.append(plan.call_count)
        return counts


def restore(folder, strategy):
    """Restore; return the values of weights and moments."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.checkpoint(folder, model=model, optimizer=optimizer)
        return [
            (full(parameter), full(optimizer.state[parameter]["momentum_buffer"])) for parameter in model.parameters()
        ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_another_layout_is_planned_and_the_last_checkpoint_has_the_last_values(ranks, tmp_path, strategy):
    assert ranks(2, save_three_times, tmp_path, strategy) == [[1, 2, 2, 2]] * 2
    for size in (1, 2):
        for values in ranks(size, restore, tmp_path, strategy):
            for number, (weight, moment) in enumerate(values):
                assert torch.equal(weight, torch.full_like(weight, 300.0 + number))
                assert torch.equal(moment, torch.full_like(moment, -300.0 - number))


def change_on_one_rank(folder):
    """On rank 1 one tensor changes its shape between two saves; return how often DCP planned."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model, extra = run.wrap(nn.Linear(2, 1), "ddp"), Extra(run.rank)
        checkpoint = run.checkpoint(folder, model=model, extra=extra)
        with mock.patch.object(tensor_storage.dcp, "save", wraps=tensor_storage.dcp.save) as plan:
            for step in range(3):
                extra.size = 3 if run.rank == 1 and step else 2
                checkpoint.save(step=step)
                checkpoint.wait()
            return plan.call_count


class Extra:
    """A part with a tensor that is named after its rank."""

    def __init__(self, rank):
        self.rank, self.size = rank, 2

    def state_dict(self):
        return {f"rank{self.rank}": torch.zeros(self.size)}

    def load_state_dict(self, state):
        pass


def test_all_ranks_plan_again_if_one_rank_has_another_layout(ranks, tmp_path):
    assert ranks(2, change_on_one_rank, tmp_path) == [2, 2]


def fail_to_copy(folder):
    """Rank 1 has no memory for the second save; return the message, and whether the third save works."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model = run.wrap(nn.Linear(2, 1), "ddp")
        checkpoint = run.checkpoint(folder, model=model)
        checkpoint.save(step=0)
        stage = HostStaging.stage_again if run.rank == 0 else mock.Mock(side_effect=MemoryError("no memory"))
        message = None
        try:
            with mock.patch.object(HostStaging, "stage_again", stage):
                checkpoint.save(step=1)
        except CheckpointError as error:
            message = str(error)
        checkpoint.save(step=2)
        checkpoint.wait()
        return message


def test_a_rank_that_cannot_copy_its_tensors_is_named_on_every_rank_and_the_next_save_works(ranks, tmp_path):
    messages = ranks(2, fail_to_copy, tmp_path)
    assert messages == ["rank 1: the state cannot be saved: MemoryError: no memory"] * 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000000", "step-00000002"]
