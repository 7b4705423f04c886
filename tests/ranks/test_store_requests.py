"""What a run asks of the store that all ranks share: requests per rank and second, and the number of keys."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.distributed import rank_warnings


def keys_after_each(folder, acts):
    """The number of keys in the store after each of several rounds of everything that uses it."""
    counts, kept, rank_warnings._KEPT = [], rank_warnings._KEPT, 1
    with warnings.catch_warnings(), Run(global_batch=4, seed=0, folder=folder) as run:
        warnings.simplefilter("ignore", UserWarning)
        warnings.filterwarnings("always", "round")
        model = run.wrap(nn.Linear(2, 1))
        train = run.shard(TensorDataset(torch.zeros(8, 2)), num_workers=0)
        checkpoint = run.checkpoint(folder, model=model, train=train, keep=2)
        early = run._lifecycle.context.metrics._early
        for act in range(acts):
            run.once(str, act)
            run.once(bytes, 5 << 20, per="node")
            with pytest.raises(ZeroDivisionError):
                run.once(divmod, 1, 0)
            checkpoint.save(act)
            checkpoint.wait()
            run.mean(1.0)
            early._is_urgent = lambda: True
            early._promise()
            early._is_urgent = lambda: False
            while not early.at_boundary():
                pass
            run.barrier()
            early.synced()
            warnings.warn(f"round {act}", RuntimeWarning, stacklevel=1)
            run.barrier()
            counts.append(run._comm.store.num_keys())
            run.barrier()
    rank_warnings._KEPT = kept
    return counts


def test_the_store_does_not_grow_with_saves_and_other_collectives(ranks, tmp_path):
    for counts in ranks(2, keys_after_each, tmp_path, 5):
        assert len(set(counts[1:])) == 1, counts
