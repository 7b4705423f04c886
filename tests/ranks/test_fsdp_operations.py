"""A step of a sharded model runs the same collectives, casts, copies and kernels as a hand-written FSDP2 loop."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.environment.hardware import probe_bf16

WORDS, WIDTH, LENGTH, ROWS = 96, 32, 4, 8
RANKS, STEPS, WARM_UP = 2, 5, 3
# Losses, their sums, learning rates and checks of one parameter are smaller; weights, activations and logits are not.
LARGE = 2 * WIDTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Decoder(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LargeOperations(TorchDispatchMode):
    """Counts operations on tensors that are not small, by name and dtypes, and collectives."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
        name = str(func)
        if name.startswith(("c10d", "fsdp")) or any(each.numel() >= LARGE for each in tensors):
            dtypes = sorted({str(each.dtype) for each in tensors})
            self.counts[" ".join([name, *dtypes])] += 1
        return result


VIEWS = ("view", "detach", "as_strided", "slice", "split", "select", "transpose", "expand", "alias", ".t.", "narrow")


def computed(counts):
    """Without views, which cost no time on a device."""
    return {name: count for name, count in counts.items() if not any(view in name.split()[0] for view in VIEWS)}


def data():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (STEPS * RANKS * ROWS, LENGTH + 1), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def losses(logits, labels, reduction):
    """In the dtype of the logits: autocast on the CPU would make a copy in fp32, which CUDA does not need."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


@contextmanager
def counted(step, found):
    with LargeOperations() as operations:
        yield
    if step >= WARM_UP:
        found.append(computed(operations.counts))


def by_samestep(strategy, micro_batches):
    found = []
    with Run(global_batch=RANKS * ROWS, precision="bf16", replica_check_every=0) as run:
        model = run.wrap(Decoder(), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in run.shard(data(), num_workers=0, micro_batch=ROWS // micro_batches).epochs(1):
            for step in epoch:
                with counted(step.number, found):
                    for tokens, labels in step:
                        with torch.autocast("cpu", torch.bfloat16):  # as samestep does in a step on a GPU
                            logits = model(tokens)
                        values = losses(logits, labels, "none").view(labels.shape)
                        step.mean(values).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return found


def by_hand(strategy, micro_batches):
    found = []
    with Run(global_batch=RANKS * ROWS) as run:  # for its process group
        model, mesh = Decoder(), init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=strategy == "fsdp")
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens, labels = (tensor.chunk(RANKS)[run.rank].chunk(STEPS) for tensor in data().tensors)
        for step in range(STEPS):
            with counted(step, found):
                parts = zip(*(tensor[step].chunk(micro_batches) for tensor in (tokens, labels)), strict=True)
                for number, (inputs, targets) in enumerate(parts, 1):
                    model.set_requires_gradient_sync(number == micro_batches)
                    model.set_is_last_backward(number == micro_batches)
                    (losses(model(inputs), targets, "mean") / micro_batches).backward()
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_step_runs_the_operations_of_a_hand_written_loop(ranks, strategy, micro_batches):
    if probe_bf16().status != "works":
        pytest.skip("bf16 kills processes on this CPU without a setting that must be made before they start")
    expected = ranks(RANKS, by_hand, strategy, micro_batches)
    for found, wanted in zip(ranks(RANKS, by_samestep, strategy, micro_batches), expected, strict=True):
        assert wanted[-1]["c10d._reduce_scatter_base_.default torch.float32"] == 4  # three blocks and the rest
        assert len(found) == STEPS - WARM_UP
        for each, other in zip(found, wanted, strict=True):
            assert each == other
