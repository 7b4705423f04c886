"""A steady step does not wait for the GPU: samestep reads nothing from the device until it is written."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run, read_metrics
from samestep.errors import StepError
from samestep.nn import linear_cross_entropy

WIDTH, CLASSES, BATCH, STEPS = 64, 5, 16, 48
STEADY = range(12, 44)  # the first steps compile kernels and allocate, the last ones have another shape


def steady_steps(
    folder,
    precision="fp32",
    dropout=0.0,
    clip=False,
    micro_batch=None,
    capturable=False,
    interval=4,
    mask=False,
    strategy=None,
):
    """Train with errors for everything that waits for the GPU in steady steps; returns the losses that it has seen."""
    warnings.filterwarnings("ignore", "Synchronization debug mode")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (BATCH * STEPS,), generator=generator)
    data = TensorDataset(torch.randn(BATCH * STEPS, WIDTH, generator=generator), labels)
    seen = []
    with Run(global_batch=BATCH, seed=0, folder=folder, precision=precision, replica_check_every=0) as run:
        layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)]
        model = run.wrap(nn.Sequential(*layers), strategy)
        rate = torch.tensor(1e-3, device=run.device) if capturable else 1e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=capturable)
        run._lifecycle.context.metrics._next_interval = lambda: interval
        try:
            for epoch in run.shard(data, shuffle=True, micro_batch=micro_batch, num_workers=0).epochs(1):
                for step in epoch:
                    # what one step starts, the boundary after it and the next batch are checked too
                    torch.cuda.set_sync_debug_mode("error" if step.number in STEADY else "default")
                    for inputs, targets in step:
                        noise = step.normal(WIDTH) if dropout else 0.0
                        scores = model(inputs + 0.01 * noise)
                        losses = cross_entropy(scores, targets, reduction="none")
                        step.mean(losses, mask=inputs[:, 0] > -1 if mask else None).backward()
                        step.log({"accuracy": scores.argmax(-1) == targets})
                    if clip:
                        run.log({"norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0)})
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(step.loss)
                    run.log({"value": torch.ones((), device=run.device) * step.number})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [run.mean(loss) for loss in seen]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": True},
        {"precision": "bf16", "clip": True},
        {"dropout": 0.1},
        {"precision": "bf16", "dropout": 0.1, "micro_batch": 4},
        {"capturable": True, "interval": 1},
        {"mask": True},
        {"mask": True, "precision": "bf16", "micro_batch": 4},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_no_steady_step_waits_for_the_gpu(tmp_path, options):
    seen = steady_steps(tmp_path, **options)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["train/loss"] for record in records] == pytest.approx(seen, rel=1e-12)
    assert [record["value"] for record in records] == list(range(STEPS))
    assert all(0 <= record["accuracy"] <= 1 for record in records)
    assert all(record["train/learning_rate"] == pytest.approx(1e-3) for record in records)
    assert all("norm" in record for record in records) or "clip" not in options


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_chunked_loss_of_a_language_model_does_not_wait_for_the_gpu(autocast, frozen):
    hidden = torch.randn(4, 30, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(500, WIDTH, device="cuda", requires_grad=not frozen)
    labels = torch.randint(0, 500, (4, 30), device="cuda").masked_fill(torch.rand(4, 30, device="cuda") < 0.2, -100)
    try:
        for mode in ("default", "error"):  # the first pass allocates
            torch.cuda.set_sync_debug_mode(mode)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                losses = linear_cross_entropy(hidden, weight, labels, chunk=50)
            losses.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_without_a_count(empty, steps=8):
    """Train with a mask that is zero everywhere in one step; the number of the last step that began."""
    last = -1
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for epoch in run.shard(TensorDataset(torch.ones(4 * steps, 2)), num_workers=0).epochs(1):
                for step in epoch:
                    last = step.number
                    for (x,) in step:
                        losses = model(x)[:, 0]
                        step.mean(losses, mask=torch.full_like(losses, float(last != empty))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            assert all(p.isfinite().all() for p in model.parameters())
    return last


@pytest.mark.parametrize("empty", [0, 3, 7])
def test_a_mask_of_zeros_raises_at_most_two_steps_later(empty):
    with pytest.raises(StepError, match=f"the masks of step {empty} are zero everywhere on all ranks"):
        train_without_a_count(empty)
    assert train_without_a_count(None) == 7
