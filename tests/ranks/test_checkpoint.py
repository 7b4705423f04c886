"""Checkpoints of real runs: the same training on any world size and strategy; errors on one rank reach all ranks."""

import gc
import json
import os
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.checkpoint import folder_lock
from samestep.data.audit import audit
from samestep.environment.processes import seconds_from_boot
from tests.ranks.models import TASKS, Mlp, dataset

pytestmark = pytest.mark.slow

EPOCHS = 3  # of four steps each: 23 samples, 7 at a time


class Interrupted(Exception):
    pass


def destroy_process_group():
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class NoisyMlp(Mlp):
    """Draws for each sample, so that a step which is trained again must draw the same."""

    def forward(self, x):
        x = self.body(x)
        return self.head(dropout(x, 0.2, self.training) + 0.1 * torch.randn_like(x) * torch.rand(()))


def train(folder, strategy=None, fail_at=None, every=3, kind=torch.optim.AdamW, dtype=torch.float64, in_body=False):
    """Resume from the folder and train; fail in step `fail_at`. Return the weights, or None after a failure."""
    try:
        with Run(global_batch=7, seed=2, folder=folder, ledger=True) as run:
            task = TASKS["mlp"]
            model = run.wrap(NoisyMlp().to(dtype), None if run.size == 1 else strategy)
            optimizer = kind(model.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], gamma=0.5)
            data = run.shard(dataset(task, dtype), shuffle=True, num_workers=0, micro_batch=3)
            checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler, train=data)
            if not in_body:
                checkpoint.every(steps=every)
            for epoch in data.epochs(EPOCHS):
                for step in epoch:
                    for batch in step:
                        if step.number == fail_at:
                            raise Interrupted
                        task.loss(model, step, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if in_body and step.number % every == 0:
                        checkpoint.save()
                    scheduler.step()
            with torch.no_grad():
                return {name: full(value).clone() for name, value in model.state_dict().items()}
    except Interrupted:
        destroy_process_group()
        return None


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name.startswith(("step-", ".")))


def max_difference(weights, others):
    return max(float((weights[name] - others[key]).abs().max()) for name, key in zip(weights, others, strict=True))


@pytest.mark.parametrize("in_body", [False, True])
def test_training_interrupted_on_changing_world_sizes_ends_with_the_same_weights(ranks, tmp_path, in_body):
    (uninterrupted,) = ranks(1, train, tmp_path / "uninterrupted")
    folder = tmp_path / "interrupted"
    starts = [(4, "fsdp", 4), (1, None, 5), (3, "ddp", 7), (2, "fsdp", 10), (4, "ddp", 11), (1, None, None)]
    for size, strategy, fail_at in starts:
        answers = ranks(size, train, folder, strategy, fail_at, 3, torch.optim.AdamW, torch.float64, in_body)
    assert max_difference(uninterrupted, answers[0]) < 1e-12
    report = audit(folder)
    assert report.exactly_once
    trained = next(shard for shard in report.shards if shard.name == "shard-0")
    assert [(epoch.number, epoch.samples) for epoch in trained.epochs] == [(at, 23) for at in range(EPOCHS)]
    assert not [name for name in names(folder) if name.startswith(".")]


def test_float32_and_momentum_are_restored(ranks, tmp_path):
    def once(size, strategy, folder, fail_at=None):
        return ranks(size, train, folder, strategy, fail_at, 3, MomentumSgd, torch.float32)[0]

    uninterrupted = once(2, "ddp", tmp_path / "uninterrupted")
    assert once(2, "fsdp", tmp_path / "interrupted", 7) is None
    assert max_difference(uninterrupted, once(3, "ddp", tmp_path / "interrupted")) < 1e-6


class MomentumSgd(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)


def state_of(folder, strategy, save):
    """Save or restore a model and an optimizer with random state; return the unsharded state of this rank."""
    with Run(global_batch=8, seed=0, folder=folder) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        data = run.shard(TensorDataset(torch.randn(16, 6)), num_workers=0)
        checkpoint = run.checkpoint(folder, model=model, optimizer=optimizer, train=data)
        if save:
            for epoch in data.epochs(1):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).square().sum(1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            checkpoint.save()
        with torch.no_grad():
            state = {name: full(value).clone() for name, value in model.state_dict().items()}
            for at, (name, _) in enumerate(model.named_parameters()):
                for key, value in optimizer.state_dict()["state"][at].items():
                    state[f"{name} {key}"] = full(value).clone()
        return {name.removeprefix("module."): value for name, value in state.items()}, data.state_dict()


@pytest.mark.parametrize(
    ("saver", "loader"),
    [((1, None), (4, "fsdp")), ((4, "fsdp"), (1, None)), ((2, "ddp"), (3, "fsdp")), ((3, "fsdp"), (2, "ddp"))],
)
def test_every_value_is_restored_on_any_world_size_and_strategy(ranks, tmp_path, saver, loader):
    saved, position = ranks(saver[0], state_of, tmp_path, saver[1], True)[0]
    for loaded, restored in ranks(loader[0], state_of, tmp_path, loader[1], False):
        assert restored == position
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(value, loaded[name]), name
            assert value.dtype == loaded[name].dtype


def fail_to_write(folder, failing):
    """Let writing fail on rank `failing`, while training continues."""
    with Run(global_batch=2, seed=0, folder=folder / "logs") as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(400, 1)), num_workers=0)
        checkpoint = run.checkpoint(folder / "out", model=model, train=data)
        if run.rank == failing:
            from samestep.checkpoint import save as save_module

            save_module.safetensors_blocks = full_disk
        try:
            for epoch in data.epochs(1):
                for step in epoch:
                    for (x,) in step:
                        step.mean(model(x).sum(1)).backward()
                    if step.number == 3:
                        checkpoint.save()
                    time.sleep(0.02)
        finally:
            if run.rank == failing:
                from samestep.checkpoint.tensor_storage import safetensors_blocks

                save_module.safetensors_blocks = safetensors_blocks


def full_disk(entries):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_is_raised_on_all_at_a_step_boundary(ranks, tmp_path, failing):
    for text in ranks.errors(2, fail_to_write, tmp_path, failing):
        assert "CheckpointError: writing the checkpoint" in text
        assert f"on rank {failing} failed: the disk is full: free some space, or keep fewer with keep=" in text
        assert "the checkpoints already published are unchanged" in text
        assert "in on_step_end" in text
    time.sleep(0.1)
    assert names(tmp_path / "out") == []


def save_different_steps(folder):
    with Run(global_batch=2, seed=0, folder=folder) as run:
        model = run.wrap(nn.Linear(1, 1))
        run.checkpoint(folder, model=model).save(step=run.rank)


def test_ranks_that_save_different_steps_raise(ranks, tmp_path):
    first, second = ranks.errors(2, save_different_steps, tmp_path)
    assert "rank 0 saves step 0 and rank 1 saves step 1: all ranks must save the same step" in first
    assert "rank 1 saves step 1 and rank 0 saves step 0" in second


def save_backwards(folder):
    with Run(global_batch=2, seed=0, folder=folder) as run:
        checkpoint = run.checkpoint(folder, model=run.wrap(nn.Linear(1, 1)))
        for step in (100, 50):
            checkpoint.save(step=step)


def test_a_step_below_the_last_one_is_rejected_on_all_ranks(ranks, tmp_path):
    for text in ranks.errors(2, save_backwards, tmp_path):
        assert "CheckpointError: rank 0: checkpoint step 50 is below the step of " in text
    assert names(tmp_path) == ["step-00000100"]


def restore_in_use(folder):
    with pytest.MonkeyPatch.context() as patch, Run(global_batch=2, seed=0, folder=folder / "logs") as run:
        patch.setattr(folder_lock, "_TAKEOVER_SECONDS", 1.0)  # not 10: the other run does not end
        if run.is_main:
            folder.mkdir(exist_ok=True)
            pid = os.getppid()
            theirs = replace(folder_lock._this_process(), pid=pid, started_at=seconds_from_boot(pid), launch="")
            (folder / folder_lock.LOCK_FILE).write_text(json.dumps(asdict(theirs)))
        run.checkpoint(folder, model=run.wrap(nn.Linear(1, 1)))


def test_a_folder_in_use_is_rejected_on_all_ranks(ranks, tmp_path):
    for text in ranks.errors(2, restore_in_use, tmp_path / "out"):
        assert f"CheckpointError: {tmp_path / 'out'} is in use by another run (process " in text


class UnsupportedOnRank1:
    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"inner": {"hook": print if self.rank == 1 else 0}}

    def load_state_dict(self, state):
        pass


def save_unsupported(folder):
    with Run(global_batch=2, seed=0, folder=folder) as run:
        run.checkpoint(folder, model=run.wrap(nn.Linear(1, 1)), part=UnsupportedOnRank1(run.rank)).save()


def test_state_that_cannot_be_saved_on_one_rank_raises_on_all(ranks, tmp_path):
    for text in ranks.errors(2, save_unsupported, tmp_path):
        assert "CheckpointError: rank 1: part/inner/hook is a value of builtin_function_or_method" in text
    assert names(tmp_path) == [] or all(name.startswith(".writing") for name in names(tmp_path))


def save_by_the_clock(folder, of_rank):
    """Save by the clock with a tiny interval on one rank and hours on the other."""
    with Run(global_batch=1, seed=0, folder=folder) as run:
        model = run.wrap(nn.Linear(1, 1))
        data = run.shard(TensorDataset(torch.zeros(30, 1)), num_workers=0)
        checkpoint = run.checkpoint(folder, model=model, train=data, keep=100)
        checkpoint.every(minutes=1e-9 if run.rank == of_rank else 600)
        for epoch in data.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
                time.sleep(0.05)
        checkpoint.wait()
        return len(names(folder)) if folder.exists() else 0


def test_saving_by_minutes_uses_the_clock_of_rank_0(ranks, tmp_path):
    first, second = ranks(2, save_by_the_clock, tmp_path / "first", 0)
    assert first == second >= 2
    assert ranks(2, save_by_the_clock, tmp_path / "second", 1) == [0, 0]


def flip_bit(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)


def restored_step(folder):
    with Run(global_batch=2, seed=0, folder=folder / "logs") as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = run.checkpoint(folder, model=run.wrap(Mlp(), None if run.size == 1 else "fsdp"))
        warned = [str(warning.message) for warning in caught]
        return (checkpoint.restored and checkpoint.restored.name), warned


def save_two(folder):
    with Run(global_batch=2, seed=0, folder=folder / "logs") as run:
        checkpoint = run.checkpoint(folder, model=run.wrap(Mlp(), None if run.size == 1 else "fsdp"))
        for step in (10, 20):
            checkpoint.save(step=step)


def test_a_corrupt_file_of_another_rank_is_detected_by_all(ranks, tmp_path):
    ranks(2, save_two, tmp_path)
    flip_bit(tmp_path / "step-00000020" / "rank-00001.safetensors", -1, 0)
    (first, warned), (second, warned_rank_1) = ranks(2, restored_step, tmp_path)
    assert first == second == "step-00000010"
    assert warned_rank_1 == []
    assert len(warned) == 1
    assert "step-00000020 is corrupt: rank-00001.safetensors was changed after it was written" in warned[0]


def draw(folder, save, seed_of_rank=False):
    with Run(global_batch=2, seed=0, folder=folder) as run:
        checkpoint = run.checkpoint(folder, model=run.wrap(nn.Linear(1, 1)))
        if save:
            if seed_of_rank:
                torch.manual_seed(run.rank)
            torch.rand(3)
            checkpoint.save()
        return torch.rand(2).tolist()


def test_rng_states_are_restored_on_any_world_size(ranks, tmp_path):
    saved = ranks(2, draw, tmp_path, True)
    assert saved[0] == saved[1]
    assert ranks(2, draw, tmp_path, False) == saved
    assert ranks(3, draw, tmp_path, False) == saved[:1] * 3
    assert ranks(2, draw, tmp_path / "new", False) != saved


def test_ranks_that_a_script_seeds_differently_get_their_states_back_on_the_same_world_size(ranks, tmp_path):
    saved = ranks(2, draw, tmp_path, True, True)
    assert saved[0] != saved[1]
    assert ranks(2, draw, tmp_path, False) == saved
    assert ranks(3, draw, tmp_path, False) == saved[:1] * 3  # that of rank 0


def other_model(folder):
    with Run(global_batch=2, seed=0, folder=folder / "logs") as run:
        run.checkpoint(folder, model=run.wrap(nn.Linear(6, 3), "fsdp"))


def test_a_different_model_is_rejected_on_every_rank(ranks, tmp_path):
    ranks(2, save_two, tmp_path)
    for text in ranks.errors(2, other_model, tmp_path):
        assert "the checkpoint was saved with a different model: bias is only in the model; " in text
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def unshared(folder):
    """Two ranks that write to different folders, as on nodes without a shared disk."""
    with Run(global_batch=2, seed=0, folder=folder / "logs") as run:
        checkpoint = run.checkpoint(folder / "out", model=run.wrap(Mlp(), "fsdp"))
        if run.rank == 1:
            checkpoint.folder = folder / "elsewhere"
            (folder / "elsewhere").mkdir()
        checkpoint.save()
        checkpoint.wait()


def test_a_disk_that_nodes_do_not_share_raises(ranks, tmp_path):
    for text in ranks.errors(2, unshared, tmp_path):
        assert "rank-00001.safetensors was written by another rank and is not visible here" in text
        assert "must be on a disk that all nodes share" in text


def test_the_manifest_contains_the_world_sizes_of_the_training(ranks, tmp_path):
    ranks(2, train, tmp_path, "ddp", 7)
    ranks(3, train, tmp_path, "fsdp", 11)
    newest = max(path for path in tmp_path.iterdir() if path.name.startswith("step-"))
    history = json.loads((newest / "manifest.json").read_bytes())["history"]
    world_sizes = [(entry["world_size"], entry["first_step"], entry["last_step"]) for entry in history]
    assert world_sizes == [(2, 0, 6), (3, 6, 9)]
