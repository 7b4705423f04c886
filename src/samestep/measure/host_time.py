"""How long the host takes over a step: the model run for real with so few samples that the device waits for it."""

import statistics
import time
from contextlib import nullcontext

import torch

from samestep.data.sample_rng import set_micro_batch
from samestep.data.tree import map_tensors
from samestep.errors import PlanError
from samestep.measure.shapes import FloatsOnMeta
from samestep.measure.subject import Build, Loss, Subject, build_subject
from samestep.measure.trace import FEWEST
from samestep.wrap.frozen import frozen_parts, keep_frozen_in_eval
from samestep.wrap.precision import use_channels_last

# What the user's own code may raise on weights that it does not expect, as it is or told by us.
_CANNOT = (PlanError, RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
_WARM, _TIMED = 3, 7


def host_seconds(
    build: Build, device: torch.device, dtype: torch.dtype | None, loss: Loss | None, channels_last: bool
) -> float | None:
    """Seconds of the host for the forward and backward pass of a micro-batch, of any size.

    Weights are zeros, made on `device` straight away. None where the model cannot be run so.
    """
    try:
        with FloatsOnMeta():
            subject = build_subject(build, loss)
        subject = _made(subject, device)
        keep_frozen_in_eval(subject.model, frozen_parts(subject.model))
        if channels_last:
            use_channels_last(subject.model, subject.model)
        return _timed(subject, device, dtype)
    except _CANNOT:
        return None
    finally:
        set_micro_batch(None)


def _timed(subject: Subject, device: torch.device, dtype: torch.dtype | None) -> float:
    batch, spans = subject.batch(FEWEST), list[float]()
    for _ in range(_WARM + _TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        since = time.perf_counter()
        set_micro_batch(torch.zeros(FEWEST, dtype=torch.long))
        with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
            value = subject.compute_loss(batch)
        value.backward()
        spans.append(time.perf_counter() - since)
        subject.model.zero_grad()
    return statistics.median(spans[_WARM:])


def _made(subject: Subject, device: torch.device) -> Subject:
    """The subject on `device`: whole numbers as they are, the others zeros."""
    known = [(name, t) for name, t in _tensors(subject) if not t.is_meta]
    model = subject.model.to_empty(device=device)
    there = dict(_tensors(subject))
    with torch.no_grad():
        for tensor in there.values():
            tensor.zero_()
        for name, value in known:
            there[name].copy_(value)
    example = map_tensors(subject.example, lambda t: torch.zeros_like(t, device=device) if t.is_meta else t.to(device))
    return Subject(model, example, subject.samples, subject.loss)


def _tensors(subject: Subject) -> list[tuple[str, torch.Tensor]]:
    return [*subject.model.named_parameters(), *subject.model.named_buffers()]
