"""`trainable_only`: checkpoints without frozen weights, on any number of ranks, for the same frozen weights only."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from samestep import Run
from samestep.checkpoint.parts import tensor_checksum
from samestep.errors import CheckpointError
from samestep.messages import SamestepWarning

pytestmark = pytest.mark.slow

DATA = [(torch.randn(6, generator=torch.Generator().manual_seed(i)).double(), i % 3) for i in range(22)]


class Adapted(nn.Module):
    """A frozen body with statistics, a frozen parameter beside trainable ones, and a trainable head."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64))
        self.scale = nn.Parameter(torch.ones(64), requires_grad=False)
        self.head = nn.Linear(64, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(dropout(self.body(x) * self.scale, 0.2, self.training))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Interrupted(Exception):
    pass


def train(folder, strategy=None, fail_at=None, seed=0, trainable_only=True):
    """Resume and train two epochs of three steps; fail in step `fail_at`. Return the weights."""
    with Run(global_batch=8, seed=3, folder=folder) as run:
        model = run.wrap(Adapted(seed).double(), None if run.size == 1 else strategy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        data = run.shard(DATA, shuffle=True, num_workers=0)
        parts = {"model": model, "optimizer": optimizer, "train": data}
        checkpoint = run.checkpoint(folder, trainable_only=trainable_only, **parts)
        checkpoint.every(steps=1)
        for epoch in data.epochs(2):
            for step in epoch:
                if step.number == fail_at:
                    raise Interrupted
                for inputs, labels in step:
                    losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
                    step.mean(losses).backward()
                optimizer.step()
                optimizer.zero_grad()
        state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        return {name: full(value).detach().clone() for name, value in state.items()}


def newest(folder):
    path = folder / (folder / "latest").read_text().strip()
    return json.loads((path / "index.json").read_bytes()), json.loads((path / "state.json").read_bytes())


def test_a_training_without_frozen_weights_in_checkpoints_resumes_on_other_ranks(ranks, tmp_path):
    (expected,) = ranks(1, train, tmp_path / "one")
    folder = tmp_path / "resumed"
    ranks.errors(2, train, folder, "fsdp", 1)
    ranks.errors(3, train, folder, "ddp", 3)
    ranks.errors(1, train, folder, None, 4)
    for weights in ranks(2, train, folder, "zero2"):
        for name, value in expected.items():
            assert float((weights[name] - value).abs().max()) < 1e-12, name
    index, state = newest(folder)
    assert {name for name in index if name.startswith("model/")} == {"model/head.weight", "model/head.bias"}
    assert {name for name, value in state["model"].items() if value["~"] == "frozen"} == {
        "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var",
        "body.1.num_batches_tracked", "scale",
    }  # fmt: skip


def test_other_frozen_weights_are_rejected_on_every_rank(ranks, tmp_path):
    ranks.errors(2, train, tmp_path, "ddp", 2)
    for text in ranks.errors(2, train, tmp_path, "fsdp", None, 1):
        assert "cannot be restored: the checkpoint contains only trainable tensors, and frozen tensors differ" in text
        assert "from those that it was trained with: scale has other values; body.0.weight has other values;" in text
        assert "build the model from the same weights and in the same dtype" in text
    with pytest.raises(CheckpointError, match=r"scale is torch\.float32 here and torch\.float64 there"):
        restore(tmp_path, Adapted())


def restore(folder, model, **options):
    with Run(global_batch=8, seed=3, folder=folder / "logs") as run:
        return run, run.checkpoint(folder, model=model, **options)


@pytest.mark.parametrize("first", [True, False])
def test_the_option_may_change_at_a_restart(ranks, tmp_path, first):
    (expected,) = ranks(1, train, tmp_path / "one")
    folder = tmp_path / "changed"
    ranks.errors(2, train, folder, "ddp", 4, 0, first)
    for weights in ranks(2, train, folder, "ddp", None, 0, not first):
        assert all(float((weights[name] - value).abs().max()) < 1e-12 for name, value in expected.items())
    index, _ = newest(folder)
    assert ("model/body.0.weight" in index) is first


def test_a_full_checkpoint_replaces_frozen_weights(tmp_path):
    ranks_of_one = Adapted(1).double()
    with Run(global_batch=8, seed=3, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, model=ranks_of_one).save()
    model = Adapted(0).double()
    with Run(global_batch=8, seed=3, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, model=model, trainable_only=True).save()
    assert torch.equal(model.body[0].weight, ranks_of_one.body[0].weight)
    restore(tmp_path, Adapted(1).double())  # the checksums are those of the weights that were loaded


def test_a_frozen_tensor_that_the_script_changes_is_named_at_the_next_save(tmp_path):
    model = Adapted()
    with Run(global_batch=8, folder=tmp_path / "logs") as run:
        checkpoint = run.checkpoint(tmp_path, model=model, trainable_only=True)
        checkpoint.save(step=1)
        with torch.no_grad():
            model.scale.mul_(2)
        with pytest.raises(CheckpointError, match=r"model has 1 frozen tensor\(s\) that were changed after run\."):
            checkpoint.save(step=2)


def test_a_moving_average_without_trainable_parameters_is_saved_in_full(tmp_path):
    average = Adapted().requires_grad_(False)
    with Run(global_batch=8, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path, model=Adapted(), average=average, trainable_only=True).save()
    index, _ = newest(tmp_path)
    assert "average/body.0.weight" in index
    assert "model/body.0.weight" not in index


def test_the_average_of_a_model_with_frozen_parts_is_saved_in_full_after_its_updates(tmp_path):
    weights = []
    for updates in (1, 2):
        with Run(global_batch=8, folder=tmp_path / "logs") as run:
            model = run.wrap(Adapted())
            average = run.average(model)
            checkpoint = run.checkpoint(tmp_path, model=model, average=average, trainable_only=True)
            weights.append((average.module.head.weight.clone(), int(average.n_averaged)))
            with torch.no_grad():
                model.head.weight.add_(1)
            average.update_parameters(model)
            average.update_parameters(model)
            weights.append((average.module.head.weight.clone(), int(average.n_averaged)))
            checkpoint.save(step=updates)
    assert [count for _, count in weights] == [0, 2, 2, 4]
    assert torch.equal(weights[1][0], weights[2][0])
    assert {"average/module.body.0.weight", "average/module.scale"} <= newest(tmp_path)[0].keys()


def test_an_option_without_effect_warns(tmp_path):
    with pytest.warns(SamestepWarning, match="trainable_only=True of run.checkpoint has no effect: no model that it"):
        restore(tmp_path, nn.Linear(2, 2), trainable_only=True)


def test_a_checksum_depends_on_values_order_and_every_block():
    values = torch.arange(600_000, dtype=torch.float32)
    found = {tensor_checksum(values), tensor_checksum(values.flip(0)), tensor_checksum(values.roll(1 << 18))}
    changed = values.clone()
    changed[-1] += 1
    assert len(found | {tensor_checksum(changed)}) == 4
    assert tensor_checksum(values) == tensor_checksum(values.clone().view(600, 1000))
    assert tensor_checksum(torch.zeros(0)) == tensor_checksum(torch.zeros(3, dtype=torch.uint8))
    assert tensor_checksum(torch.ones(3, dtype=torch.bool)) != tensor_checksum(torch.zeros(3, dtype=torch.bool))
