"""What SameStep warns of at the start of a training, as run.wrap does."""

import warnings

import pytest
from torch import nn

from tests.lightning.trained import closing, loader, make_trainer, regression

pytestmark = pytest.mark.slow


def batchnorm_warnings(frozen, synced):
    return closing(_batchnorm_warnings, frozen, synced)


def _batchnorm_warnings(frozen, synced):
    """Return samestep's warnings of a training with a BatchNorm layer."""
    from samestep.lightning import SameStep
    from samestep.messages import SamestepWarning
    from samestep.parallel.batchnorm import CpuSyncBatchNorm

    same, module = SameStep(global_batch=8), regression()
    # Lightning synchronizes on GPUs only: here a layer that is already synchronized.
    module.net.insert(1, (CpuSyncBatchNorm if synced else nn.BatchNorm1d)(8).requires_grad_(not frozen))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callbacks=[same]).fit(module, datamodule=same.dataloaders(train=loader(16)))
    return [str(warning.message) for warning in caught if issubclass(warning.category, SamestepWarning)]


def test_batchnorm_on_several_ranks_is_warned_of_on_rank_0(ranks):
    zero, one = ranks(2, batchnorm_warnings, False, False)
    assert zero == [
        "1 BatchNorm layer(s), 'net.1' first, see only the rows of their own rank, so results depend on the number of "
        "ranks: pass Trainer(sync_batchnorm=True), which needs GPUs, or use GroupNorm; evaluation and checkpoints have "
        "the running statistics of rank 0"
    ]
    assert one == []


def test_one_rank_and_synchronized_or_frozen_batchnorm_give_no_warning(ranks):
    assert ranks(1, batchnorm_warnings, False, False) == [[]]
    assert ranks(2, batchnorm_warnings, False, True) == [[], []]
    assert ranks(2, batchnorm_warnings, True, False) == [[], []]
