"""Gradients that accumulate over the micro-batches of a step: detect that the script resets them in between."""

import ast
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from samestep.environment.world import halved_note
from samestep.errors import StepError
from samestep.parallel.fsdp import local_tensor
from samestep.torch_private import after_this_backward

_PACKAGE = str(Path(__file__).parent.parent)
_RESET = "zero_grad"


class AccumulationWatch:
    """Watches the gradient of one parameter, and raises if it was reset since the step's last backward pass.

    `zero_grad` resets it to None, which is visible on the host: no transfer. If it writes zeros instead, they count
    only if the gradient was not zero when the backward pass ended: that of padding is zero without a reset. Values are
    compared in the first step only, since a script that writes zeros does so in every step.
    """

    def __init__(self, used: nn.Parameter, parameters: Sequence[nn.Parameter]) -> None:
        """Watch one of `parameters`, which hold the gradients on this rank; the backward pass computes with `used`."""
        self._parameters, self._steps = parameters, 0
        self._step: Sized | None = None
        self._number = self._thread = 0
        self._kept: tuple[nn.Parameter, torch.Tensor | None] | None = None  # and whether its gradient was not zero
        used.register_hook(self._check)
        used.register_post_accumulate_grad_hook(self._after)

    def start(self, step: Sized, number: int) -> None:
        """Watch from now on; called by the thread of the training loop before each micro-batch."""
        if self._step is not step:
            self._step, self._number, self._thread, self._kept = step, number, threading.get_ident(), None
            self._steps += 1

    def finish(self) -> None:
        """Check for the last time in this step."""
        try:
            self._check()
        finally:
            self._step = self._kept = None

    def _after(self, _: torch.Tensor) -> None:
        if self._step is not None:
            after_this_backward(self._keep)

    def _keep(self) -> None:
        for parameter in self._parameters:
            gradient = parameter.grad
            # a rank may hold no element of a small parameter that FSDP has sharded
            if gradient is not None and not gradient.is_sparse and (local := local_tensor(gradient)).numel():
                self._kept = parameter, local.any() if self._steps == 1 else None
                return

    def _check(self, *_: torch.Tensor) -> None:
        if self._step is None or self._kept is None:
            return
        parameter, nonzero = self._kept
        if parameter.grad is not None and (nonzero is None or not nonzero or local_tensor(parameter.grad).any()):
            return
        raise StepError(reset_message(self._step, self._number, self._thread))


def reset_message(step: Sized, number: int, thread: int) -> str:
    """Which line has reset the gradients, and what to do; `thread` runs the training loop."""
    line = _reset_line(step, thread)
    found = f"{line} resets the gradients" if line else "the gradients were reset (by zero_grad()?)"
    return (
        f"{found} inside the loop over the micro-batches of step {number}, so those of its earlier micro-batches "
        f"are lost: the step has {len(step)} micro-batches{halved_note()}, whose gradients add up; call zero_grad() "
        "after the loop, after optimizer.step()"
    )


def _reset_line(step: Sized, thread: int) -> str | None:
    """The line of the script that calls zero_grad inside the loop over `step`, as `train.py:31`; best effort."""
    # the thread of the training loop: on a GPU, hooks run in a thread of the backward pass
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  # public in spite of its name
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            path = Path(frame.f_code.co_filename)
            loop = _loop_over(step, frame)
            region = loop if loop is not None else _function(frame)
            for node in ast.walk(region) if region is not None else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _RESET:
                    return f"{path.name}:{node.lineno}"
            if loop is not None:
                return None
        frame = frame.f_back
    return None


def _enclosing(frame: FrameType) -> Iterator[ast.AST]:
    """The statements of the frame's file that contain its current line."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:  # not Python source, such as a frame of a compiled function
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno):
            yield node


def _loop_over(step: object, frame: FrameType) -> ast.For | None:
    """The `for` loop around the frame's current line whose iterable names the step: `step`, or `enumerate(step)`."""
    values = frame.f_globals | frame.f_locals
    for node in _enclosing(frame):
        if isinstance(node, ast.For):
            names = (name.id for name in ast.walk(node.iter) if isinstance(name, ast.Name))
            if any(values.get(name) is step for name in names):
                return node
    return None


def _function(frame: FrameType) -> ast.AST | None:
    """The function of a frame, such as one that the loop calls."""
    name = frame.f_code.co_name
    return next((node for node in _enclosing(frame) if isinstance(node, ast.FunctionDef) and node.name == name), None)
