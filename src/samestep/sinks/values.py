"""What may be logged: a name like `train/loss`, and one number."""

import re
from collections.abc import Mapping
from math import prod
from numbers import Real

import numpy as np
import torch

from samestep.errors import LogError

# Fields of our own in a line of metrics.jsonl.
RESERVED = ("infinite", "step", "time")

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)

# What a wrong value most likely was meant to be, and how to log that.
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "leave it out, or log float('nan') for a missing number"),
    (str, "log one number; text goes to run.say(...)"),
    (Mapping, 'log each of its numbers under a name of its own, e.g. "val/accuracy"'),
    ((list, tuple, set), "log one number, e.g. sum(x) / len(x)"),
    (complex, "log one real number, e.g. abs(x)"),
)


def checked_values(values: Mapping[str, object]) -> dict[str, float]:
    """The values as plain numbers, or a LogError that names the first metric that is not one.

    NaN and infinity are numbers here: a loss that overflows is news to be logged, not a reason to stop.

    >>> checked_values({"train/loss": torch.tensor(0.5), "train/seen": 64})
    {'train/loss': 0.5, 'train/seen': 64}
    """
    return {checked_name(name): number(name, value) for name, value in values.items()}


def checked_name(name: object) -> str:
    """The name, if every sink can keep it as it is."""
    if not isinstance(name, str):
        raise LogError(f'a metric is named by a {type(name).__name__} ({name!r}): use a text such as "val/accuracy"')
    if name in RESERVED:
        raise LogError(f'"{name}" is a field of metrics.jsonl and cannot name a metric: use e.g. "train/{name}"')
    if not _NAME.fullmatch(name):
        raise LogError(
            f'"{name}" cannot name a metric: use letters, digits, "_", "-" and "." in parts joined by "/", '
            'e.g. "val/accuracy"'
        )
    return name


def checked_step(step: object) -> int:
    """The step as a plain whole number from 0 on."""
    whole = step.item() if isinstance(step, np.integer | torch.Tensor) and step.ndim == 0 else step
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 0:
        raise LogError(f"step={step!r} is not a step: give a whole number from 0 on, e.g. step=epoch.number")
    return whole


def number(name: str, value: object) -> float:
    """One real number out of a Python number, a numpy scalar, or an array or tensor of one element."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = _single(name, value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float | int):
        return value
    if isinstance(value, Real):
        return float(value)
    raise LogError(f'"{name}" is {_article(value)}: {_advice(value)}')


def _single(name: str, value: "torch.Tensor | np.ndarray | np.generic") -> object:
    kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
    if prod(value.shape) != 1:
        raise LogError(f'"{name}" is {kind} of shape {tuple(value.shape)}: log one number, e.g. x.mean()')
    return value.item()


def _article(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _advice(value: object) -> str:
    return next((advice for kind, advice in _ADVICE if isinstance(value, kind)), "log one number, e.g. float(x)")
