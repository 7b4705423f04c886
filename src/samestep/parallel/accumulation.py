"""Gradients that accumulate over the micro-batches of a step: detect that the script resets them in between."""

import ast
import inspect
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

from samestep.environment.world import halved_note
from samestep.errors import StepError
from samestep.parallel.fsdp import local_tensor
from samestep.torch_private import after_this_backward

_PACKAGE: Final = str(Path(__file__).parent.parent)
_OTHER_CODE: Final = (_PACKAGE, str(Path(torch.__file__).parent))
_RESET: Final = "zero_grad"


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
            loop = _loop_over(step, frame)
            region = loop if loop is not None else _definition(frame.f_code, frame.f_lineno)
            found = _reset_in(region, frame.f_code) if region is not None else None
            if loop is not None:
                return found or _reset_in_callees(loop, frame)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _reset_in(region: ast.AST, code: CodeType) -> str | None:
    """The first line of a region of the code's file that calls zero_grad."""
    for call in _calls(region):
        if isinstance(call.func, ast.Attribute) and call.func.attr == _RESET:
            return f"{Path(code.co_filename).name}:{call.lineno}"
    return None


def _reset_in_callees(loop: ast.For, frame: FrameType) -> str | None:
    """The same in functions of the script that the loop calls; they have returned if the loop has ended."""
    values = frame.f_globals | frame.f_locals
    for call in _calls(loop):
        called: Any = None
        if isinstance(call.func, ast.Name):
            called = values.get(call.func.id)
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            called = inspect.getattr_static(values.get(call.func.value.id), call.func.attr, None)
        if inspect.isfunction(called) and not called.__code__.co_filename.startswith(_OTHER_CODE):
            definition = _definition(called.__code__, called.__code__.co_firstlineno)
            if definition is not None and (found := _reset_in(definition, called.__code__)):
                return found
    return None


def _calls(region: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(region) if isinstance(node, ast.Call))


def _enclosing(code: CodeType, line: int) -> Iterator[ast.stmt]:
    """The statements of the code's file that contain a line."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:  # not Python source, such as a frame of a compiled function
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _first_line(node) <= line <= (node.end_lineno or node.lineno):
            yield node


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min(each.lineno for each in (node, *decorators))


def _loop_over(step: object, frame: FrameType) -> ast.For | None:
    """The `for` loop around the frame's current line whose iterable names the step: `step`, or `enumerate(step)`."""
    values = frame.f_globals | frame.f_locals
    for node in _enclosing(frame.f_code, frame.f_lineno):
        if isinstance(node, ast.For):
            names = (name.id for name in ast.walk(node.iter) if isinstance(name, ast.Name))
            if any(values.get(name) is step for name in names):
                return node
    return None


def _definition(code: CodeType, line: int) -> ast.FunctionDef | None:
    """The function with this code, such as one that the loop calls; `line` is one of its lines."""
    for node in _enclosing(code, line):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            return node
    return None
