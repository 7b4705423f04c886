"""Mistakes of a first script: each raises, or gets a note, with a sentence that says what to write instead."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from transformers.modeling_outputs import CausalLMOutput

from samestep import Run
from samestep.errors import ConfigError, DataError, StepError, WrapError


def labeled(n=12):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator))


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class Records(IterableDataset):
    def __iter__(self):
        return iter(list(labeled()))


class Upwards(BatchSampler):
    """A batch sampler of the user."""


def stack(samples):
    return torch.utils.data.default_collate(samples)


def train(run, data, epochs):
    """Train a linear model up to `epochs`; returns the number of steps of this call."""
    steps = 0
    for epoch in data.epochs(epochs):
        for step in epoch:
            steps += 1
            for _ in step:
                pass
    return steps


def test_epochs_in_a_loop_of_the_script_raise_instead_of_training_nothing():
    message = (
        r"epochs\(1\) has nothing left to train, since 1 epoch\(s\) are trained: the number counts all epochs of the "
        r"run, .* write one loop, `for epoch in train\.epochs\(10\):`, or epochs\(2\) here for one more"
    )
    with Run(global_batch=4) as run:
        for data in (run.shard(labeled()), run.stream(Records())):
            assert train(run, data, 1) == 3
            with pytest.raises(DataError, match=message):
                train(run, data, 1)
            assert train(run, data, 2) == 3


def test_a_finished_run_that_starts_again_trains_nothing_without_an_error():
    with Run(global_batch=4) as run:
        data = run.shard(labeled())
        train(run, data, 2)
        state = data.state_dict()
    with Run(global_batch=4) as run:
        again = run.shard(labeled())
        again.load_state_dict(state)
        assert [train(run, again, count) for count in (1, 2, 2, 3)] == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda: DataLoader(labeled(), batch_size=6),
            r"run\.shard got a DataLoader with batch_size=6, and needs its dataset: pass run\.shard\(loader\.dataset\);"
            r" Run\(global_batch=\.\.\.\) sets the batch size over all ranks$",
        ),
        (
            lambda: DataLoader(labeled(), 6, shuffle=True, collate_fn=stack, num_workers=2, drop_last=True),
            r"pass run\.shard\(loader\.dataset, shuffle=True, collate_fn=loader\.collate_fn, num_workers=2, "
            r"drop_last=True\);",
        ),
        (
            lambda: DataLoader(labeled(), 6, sampler=WeightedRandomSampler([1.0] * 12, 12)),
            r"pass run\.shard\(loader\.dataset, sampling_weights=loader\.sampler\.weights\)",
        ),
        (
            lambda: DataLoader(labeled(), 6, sampler=DistributedSampler(labeled(), num_replicas=2, rank=0)),
            r"pass run\.shard\(loader\.dataset, shuffle=True\); .*, and the DistributedSampler is not needed, since",
        ),
        (
            lambda: DataLoader(labeled(), batch_sampler=Upwards(SequentialSampler(labeled()), 3, drop_last=False)),
            r"DataLoader with batch_size=None, .*, and the Upwards is not used",
        ),
        (lambda: DataLoader(Count(), batch_size=2), r"pass run\.stream\(loader\.dataset\);"),
    ],
)
def test_a_data_loader_is_answered_with_the_call_that_replaces_it(loader, message):
    with Run(global_batch=4) as run:
        with pytest.raises(DataError, match=message):
            run.shard(loader())
        with pytest.raises(DataError, match=message.replace(r"run\.shard got", r"run\.stream got")):
            run.stream(loader())


@pytest.mark.parametrize("kind", [RandomSampler, lambda data: DistributedSampler(data, num_replicas=2, rank=0)])
def test_a_sampler_given_as_a_dataset_raises(kind):
    sampler = kind(labeled())
    message = rf"run\.shard got a {type(sampler).__name__}, which is a sampler, and needs a dataset: pass the dataset"
    with Run(global_batch=4) as run, pytest.raises(DataError, match=message):
        run.shard(sampler)


def test_a_model_in_data_parallel_raises():
    message = r"the model is a DataParallel, and run\.wrap averages gradients .*: pass the module inside of it"
    with Run(global_batch=4) as run:
        with pytest.raises(WrapError, match=message):
            run.wrap(DataParallel(nn.Linear(1, 1)))
        with pytest.raises(WrapError, match=r"submodule '0' of the model is a DataParallel, and run\.wrap averages"):
            run.wrap(nn.Sequential(DataParallel(nn.Linear(1, 1))))


def wrap_compiled(how):
    with Run(global_batch=4) as run:
        model = nn.Linear(2, 2)
        if how == "in place":
            model.compile(backend="eager")
        run.wrap(model if how == "in place" else torch.compile(model, backend="eager"))


@pytest.mark.parametrize("how", ["in place", "by torch.compile"])
def test_a_compiled_model_raises_with_the_option_that_compiles_it(ranks, how):
    (error,) = ranks.errors(1, wrap_compiled, how)
    assert "WrapError: the model is already compiled by torch.compile: pass the module itself, and Run(comp" in error


def wrap_wrapped(kind):
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    with Run(global_batch=4) as run:
        run.wrap(wrapped)


def test_a_model_that_is_already_wrapped_raises_on_several_ranks(ranks):
    for error in ranks.errors(2, wrap_wrapped, "ddp"):
        assert "WrapError: the model is a DistributedDataParallel, and run.wrap averages gradients" in error
    for error in ranks.errors(2, wrap_wrapped, "fsdp"):
        assert "is already sharded by fully_shard (at 'the model itself'): build it without fully_shard" in error


def unpack_steps(micro_batch):
    with Run(global_batch=4) as run:
        for epoch in run.shard(labeled(), micro_batch=micro_batch).epochs(1):
            for _inputs, _labels in epoch:
                pass


def unpack_a_step(micro_batch):
    with Run(global_batch=4) as run:
        for epoch in run.shard(labeled(), micro_batch=micro_batch).epochs(1):
            for step in epoch:
                _inputs, *_labels = step


@pytest.mark.parametrize("unpack", [unpack_steps, unpack_a_step])
@pytest.mark.parametrize("micro_batch", [None, 2])  # Python would unpack two micro-batches without an error
def test_unpacking_a_step_like_a_batch_names_the_missing_loop(unpack, micro_batch):
    message = (
        r"step 0 was unpacked like a batch, so one loop is missing: training has three, `for epoch in "
        r"train\.epochs\(n\): for step in epoch: for inputs, labels in step:`"
    )
    with pytest.raises(StepError, match=message):
        unpack(micro_batch)


def test_unpacking_an_epoch_like_a_batch_names_the_missing_loop():
    with Run(global_batch=6) as run, pytest.raises(DataError, match="epoch 0 was unpacked like a batch, so one loop"):
        for _inputs, _labels in run.shard(labeled()).epochs(2):  # two steps: Python would unpack them without an error
            pass


def test_every_other_way_to_read_a_step_works():
    with Run(global_batch=4) as run:
        steps = iter(next(run.shard(labeled(), micro_batch=2).epochs(1)))
        assert len(list(next(steps))) == 2
        assert [index for index, _ in enumerate(next(steps))] == [0, 1]
        assert len([batch for batch in next(steps)]) == 2  # noqa: C416 the loop of a comprehension


def use_in_a_step(use):
    with Run(global_batch=4) as run:
        model, data = run.wrap(nn.Linear(4, 3)), run.shard(labeled())
        for epoch in data.epochs(1):
            for step in epoch:
                use(step, epoch, data, model)


@pytest.mark.parametrize(
    ("use", "note"),
    [
        (lambda step, epoch, data, model: model(step), "a Step is one optimizer step, not a batch: loop over its"),
        (lambda step, epoch, data, model: step["x"], "a Step is one optimizer step, not a batch"),
        (lambda step, epoch, data, model: step.to("cpu"), "a Step is one optimizer step, not a batch"),
        (lambda step, epoch, data, model: model(epoch), "an Epoch is a sequence of steps: `for step in epoch:`"),
        (lambda step, epoch, data, model: data[0], "a Shard is not a batch: `for epoch in train.epochs(n):"),
        (lambda step, epoch, data, model: step.shape, "a Step is one optimizer step, not a batch"),
        (lambda step, epoch, data, model: epoch.items(), "an Epoch is a sequence of steps"),
    ],
)
def test_an_epoch_or_step_used_as_a_batch_gets_a_note(use, note):
    with pytest.raises((TypeError, AttributeError)) as caught:
        use_in_a_step(use)
    assert any(text.startswith(note) for text in caught.value.__notes__)


@pytest.mark.parametrize(
    ("use", "note"),
    [
        (lambda step, epoch, data, model: step.maen(torch.ones(4)), "did you mean step.mean?"),
        (lambda step, epoch, data, model: epoch.nunber, "did you mean epoch.number?"),
        (lambda step, epoch, data, model: data.epoch(3), "did you mean shard.epochs?"),
        (lambda step, epoch, data, model: step.learning_rate, "a Step has "),
    ],
)
def test_a_misspelled_attribute_gets_the_close_name(use, note):
    with pytest.raises(AttributeError) as caught:
        use_in_a_step(use)
    (found,) = caught.value.__notes__
    assert found.startswith(note)
    assert "not a batch" not in found


def train_for_evaluation(model, optimizer, data):
    for inputs, labels in data:
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def train_the_wrapped_model():
    message = r"SGD\.step\(\) was called in a loop over a shard or stream, which is for evaluation: it has no epochs"
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for data in (run.shard(labeled(), shuffle=True), run.stream(Records())):
            with pytest.raises(StepError, match=message):
                train_for_evaluation(model, optimizer, data)


def test_training_in_a_loop_for_evaluation_raises(ranks):
    ranks(2, train_the_wrapped_model)


def train_another_model():
    with Run(global_batch=4) as run:
        run.wrap(nn.Linear(4, 3))
        probe = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        train_for_evaluation(probe, optimizer, run.shard(labeled()))
        return float(probe.weight.grad.abs().sum())


def test_another_model_may_train_in_a_loop_for_evaluation(ranks):
    assert ranks(1, train_another_model)[0] > 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda outputs, labels: cross_entropy(outputs, labels),
            "need one loss for each of the 4 rows of this micro-batch, got a scalar: use reduction='none' (and a mask "
            "for tokens that do not count, or lengths= for packed sequences); the loss that a transformers model "
            "computes from labels= is a scalar too, "
            "so compute it from its logits: step.mean(cross_entropy(outputs.logits[:, :-1].transpose(1, 2), "
            "labels[:, 1:], reduction='none'), mask=labels[:, 1:] != -100)",
        ),
        (
            lambda outputs, labels: CausalLMOutput(loss=cross_entropy(outputs, labels), logits=outputs),
            "got a CausalLMOutput: its loss is a mean over the tokens of this rank, so compute it from its logits: "
            "step.mean(cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction='none'), "
            "mask=labels[:, 1:] != -100)",
        ),
    ],
)
def test_a_loss_that_is_already_a_mean_is_answered_with_the_way_per_row_or_token(loss, message):
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Linear(4, 3))
        step = next(iter(next(run.shard(labeled()).epochs(1))))
        for inputs, labels in step:
            outputs = model(inputs)
            with pytest.raises(StepError, match=re.escape(message)):
                step.mean(loss(outputs, labels))


def compute_on_another_device(what):
    with Run(global_batch=4) as run:
        model = run.wrap(nn.Linear(4, 3))
        net = getattr(model, "module", model)
        if what == "model":
            net.to("meta")  # as model.cuda() on a machine with GPUs
        for epoch in run.shard(labeled()).epochs(1):
            for step in epoch:
                for inputs, _ in step:
                    model(inputs.to("meta") if what == "batch" else inputs)


@pytest.mark.parametrize("what", ["batch", "model"])
def test_a_tensor_on_another_device_gets_a_note_that_names_the_device_of_the_rank(ranks, what):
    note = (
        "\nthis rank computes on cpu: run.wrap moves the model there and micro-batches arrive there, so remove .cuda() "
        "and .to(...) from the script, and create other tensors with device=run.device"
    )
    for size in (1, 2):
        assert all(error.count(note) == 1 for error in ranks.errors(size, compute_on_another_device, what))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: Run(batch_size=32), "Run(...) has no argument 'batch_size': use global_batch=, the number of"),
        (lambda run: Run(global_batch=4, lr=1e-3), "Run(...) has no argument 'lr': the optimizer has the learning"),
        (lambda run: Run(global_batch=4, workers=2), "Run(...) has no argument 'workers': pass run.shard(dataset, num"),
        (lambda run: Run(global_bacth=4), "Run(...) has no argument 'global_bacth': did you mean global_batch=?"),
        (lambda run: Run(global_batch=4, xyz=1), "Run(...) has no argument 'xyz': it has global_batch, seed, folder"),
        (lambda run: run.shard(labeled(), batch_size=8), "run.shard(...) has no argument 'batch_size': Run(global_b"),
        (lambda run: run.shard(labeled(), workers=8), "run.shard(...) has no argument 'workers': use num_workers="),
        (lambda run: run.stream(Count(), pin_memory=True), "run.stream(...) has no argument 'pin_memory': remove it"),
        (
            lambda run: run.wrap(nn.Linear(1, 1), find_unused_parameters=True),
            "run.wrap(...) has no argument 'find_unused_parameters': use unused_parameters='allow'",
        ),
        (
            lambda run: run.log({"a": 1.0}, epoch=3),
            "run.log(...) has no argument 'epoch': leave it out, since every record has its step and its epoch",
        ),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_right_one(call, message):
    with Run(global_batch=4) as run, pytest.raises(TypeError, match="^" + re.escape(message)):
        call(run)


def test_an_unknown_precision_is_an_error_of_the_configuration():
    with pytest.raises(ConfigError, match=r"precision='half' is not valid: use one of 'auto', 'fp32', 'bf16', 'fp16'"):
        Run(global_batch=4, precision="half")


def join_a_group_by_hand():
    """As after mp.spawn: rank and size are arguments, and the environment variables do not say them."""
    import os

    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    with Run(global_batch=4):
        pass


def test_a_process_group_of_more_ranks_than_the_environment_says_raises(ranks):
    for rank, error in enumerate(ranks.errors(2, join_a_group_by_hand)):
        assert (
            f"WorldError: the script created a process group in which this process is rank {rank} of 2, and the "
            "environment variables say rank 0 of 1: remove dist.init_process_group and mp.spawn, and start the ranks "
            "with `samestep run --nproc-per-node 2 train.py`"
        ) in error


def sum_in_a_group_for_gpus_only():
    dist.init_process_group("cuda:gloo")  # as "nccl", which needs a GPU
    with Run(global_batch=4) as run:
        total = run.sum(run.rank + 1), run.gather(torch.tensor([run.rank])).tolist()
    dist.destroy_process_group()
    return total


def test_a_process_group_without_a_backend_for_the_cpu_is_completed(ranks):
    assert ranks(2, sum_in_a_group_for_gpus_only) == [(3, [0, 1])] * 2
