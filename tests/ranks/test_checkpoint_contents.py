"""The manifest of a checkpoint, ranks that would restore different steps, and averaged models."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from samestep import Run, __version__
from samestep.checkpoint import restore as restore_module


def save(folder):
    """Train two steps of four samples with a planned model, and save."""
    with Run(global_batch=4, seed=7, folder=folder / "logs") as run:
        model = run.wrap(nn.Linear(3, 1), example=torch.zeros(2, 3))
        data = run.shard(TensorDataset(torch.zeros(8, 3)), num_workers=0)
        checkpoint = run.checkpoint(folder / "out", model=model, train=data)
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
        checkpoint.save()


def test_the_manifest_contains_step_samples_seed_world_sizes_plan_and_versions(ranks, tmp_path):
    ranks(2, save, tmp_path)
    record = json.loads((tmp_path / "out" / "step-00000002" / "manifest.json").read_bytes())
    assert (record["step"], record["samples"]) == (2, 8)
    assert sorted(record["parts"]) == ["model", "train"]
    (entry,) = record["history"]
    versions = {"samestep": __version__, "torch": torch.__version__}
    assert entry == {"world_size": 2, "first_step": 0, "last_step": 2, "versions": versions}
    assert record["run"]["seed"] == 7
    (plan,) = record["run"]["plan"]
    assert plan["chosen"]["strategy"] == "ddp"


def restore_different_step(folder):
    """Restore while rank 1 sees another checkpoint of the same name, as on nodes without a shared disk."""
    read = restore_module.read_manifest

    def read_another(path):
        manifest = read(path)
        return replace(manifest, history=[replace(manifest.history[-1], last_step=5)])

    try:
        with Run(global_batch=4, seed=7, folder=folder / "logs") as run:
            if run.rank == 1:
                restore_module.read_manifest = read_another
            model, data = run.wrap(nn.Linear(3, 1)), run.shard(TensorDataset(torch.zeros(8, 3)), num_workers=0)
            run.checkpoint(folder / "out", model=model, train=data)
    finally:
        restore_module.read_manifest = read


def test_ranks_that_restore_different_steps_raise(ranks, tmp_path):
    ranks(2, save, tmp_path)
    for text in ranks.errors(2, restore_different_step, tmp_path):
        assert "the ranks restored different steps from " in text
        assert ": [2, 5]; make sure that " in text
        assert "out is the same folder on all nodes" in text


class Pair(nn.Module):
    """Two wrapped models in one module of the user."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second = (run.wrap(nn.Linear(3, 1), None if run.size == 1 else "ddp") for _ in range(2))


def average_and_pair(folder, save):
    """Save or restore an averaged wrapped model and a module of two wrapped models; return their values."""
    with Run(global_batch=4, seed=7, folder=folder / "logs") as run:
        model = run.wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), None if run.size == 1 else "ddp")
        average, pair = AveragedModel(model), Pair(run)
        optimizer = torch.optim.SGD(pair.parameters(), momentum=0.9)
        parts = {"model": model, "average": average, "pair": pair, "optimizer": optimizer}
        checkpoint = run.checkpoint(folder / "out", **parts)
        with torch.no_grad():
            if save:
                for at, parameter in enumerate([*average.parameters(), *pair.parameters()]):
                    parameter.fill_(at)
                for parameter in pair.parameters():
                    optimizer.state[parameter]["momentum_buffer"] = -parameter.clone()
                checkpoint.save()
            momentum = [float(optimizer.state[parameter]["momentum_buffer"].mean()) for parameter in pair.parameters()]
            return [float(full(each).mean()) for each in (*average.parameters(), *pair.parameters())], momentum


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.slow
def test_an_averaged_wrapped_model_is_restored_on_any_world_size(ranks, tmp_path):
    saved, *_ = ranks(2, average_and_pair, tmp_path, True)
    assert saved == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [-4.0, -5.0, -6.0, -7.0])
    names = json.loads((tmp_path / "out" / "step-00000000" / "index.json").read_bytes())
    assert {"average/module.0.weight", "pair/first.weight"} < names.keys()
    for size in (1, 2, 3):
        assert ranks(size, average_and_pair, tmp_path, False) == [saved] * size
