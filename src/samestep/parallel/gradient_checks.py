"""Gradients that a step lacks: of unused parameters, of passes that differ between ranks, or reset in between."""

import ast
import inspect
import json
import linecache
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from os.path import commonprefix
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from samestep.distributed.communicator import Communicator, find_differences
from samestep.distributed.rank_status import running_line
from samestep.environment.world import halved_note
from samestep.errors import StepError, WrapError
from samestep.messages import format_list
from samestep.parallel.fsdp import local_tensor
from samestep.torch_private import after_this_backward, gathered_parameters, is_fsdp

_PACKAGE: Final = str(Path(__file__).parent.parent)
_OTHER_CODE: Final = (_PACKAGE, str(Path(torch.__file__).parent))
_SHOWN = 6
_TIMED_PASSES = 10  # forward passes whose median is reported as the cost of the search


class UsedParameters:
    """Which trainable parameters received a gradient in the last micro-batch of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        # cleared after every step, since the hooks that fill it live as long as the parameters
        self._seen: dict[str, torch.Tensor] = {}
        self._model = model
        if is_fsdp(model):  # the parameters it computes with exist after the first forward pass
            self._first_forward = model.register_forward_hook(self._watch_gathered)
        else:
            self._watch(dict(model.named_parameters()))

    def __deepcopy__(self, memo: dict[int, object]) -> "UsedParameters":
        """Itself: a copy of the model, such as its moving average, is not watched."""
        del memo
        return self

    def start(self) -> None:
        """Forget earlier micro-batches."""
        self._seen.clear()

    @property
    def any(self) -> bool:
        """Whether there was a backward pass."""
        return bool(self._seen)

    def missing(self) -> list[str]:
        """The parameters without a gradient."""
        seen = set(self._seen)
        self._seen.clear()
        return [name for name in self._names if name not in seen]

    def _watch_gathered(self, model: nn.Module, *_: object) -> None:
        if model is not self._model:
            return
        self._first_forward.remove()
        self._watch(gathered_parameters(model))

    def _watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                # runs for every parameter at every step, so it must not run Python code
                parameter.register_post_accumulate_grad_hook(partial(self._seen.__setitem__, name))


class BackwardPasses:
    """Whether a DDP model had two backward passes after one forward pass: DDP reduces only the first.

    The ranks agree on it in the first step, for each loop over its micro-batches. If they all had a second pass there,
    gradients are averaged again in every step. A later step that differs from the first is an error on its rank: the
    others would not take part in the average, or it would average again what DDP has already averaged.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._any = self._repeated = False  # whether there was a backward pass, and a second one
        self._agreed: list[bool] = []  # for each loop of the first step, whether to average in every step
        self._first_step: int | None = None
        self._step: int | None = None
        self._loop = 0  # of the step
        # parameters with a gradient since the last forward pass; cleared after every step, since the hooks live longer
        self._seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._start_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # runs for every parameter at every step, so it must not run Python code
                parameter.register_post_accumulate_grad_hook(self._seen.append)

    def start(self) -> None:
        """Forget earlier micro-batches, whose gradients are not reduced."""
        self._seen.clear()
        self._any = self._repeated = False

    def need_average(self, comm: Communicator, step: Sized, number: int) -> bool:
        """Whether all ranks average the gradients of this step again; a collective in the first step."""
        self._check()
        self._loop = self._loop + 1 if self._step == number else 0
        self._step = number
        self._first_step = number if self._first_step is None else self._first_step
        if self._first_step == number:
            flags = comm.exchange("comparing backward passes in the first step", [float(self._repeated)])
            ranks = [rank for rank, flag in enumerate(flags) if flag[0]]
            if 0 < len(ranks) < len(flags):
                raise WrapError(_second_pass_message(step, number, f"rank(s) {ranks} only", self._repeated))
            self._agreed.append(bool(ranks))
        expected = self._loop < len(self._agreed) and self._agreed[self._loop]
        if self._repeated and not expected:
            raise WrapError(_second_pass_message(step, number, f"rank {comm.world.rank}, not in the first step"))
        if self._any and expected and not self._repeated:
            raise WrapError(
                f"step {number} had no second backward pass after one forward pass on rank {comm.world.rank}, and step "
                f"{self._first_step} had one: all ranks must average it; add the losses and call backward() once, or "
                "call it twice on every rank in every step"
            )
        return self._repeated

    def _start_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # otherwise DDP does not count it either
            self._check()

    def _check(self) -> None:
        self._any = self._any or bool(self._seen)
        self._repeated = self._repeated or len(self._seen) > len(set(map(id, self._seen)))
        self._seen.clear()


_END, _LEFT, _SKIPPED = "E", "X", "S"
_PASS_TEXTS: Final = {
    "F": "calls the model",
    "B": "runs a backward pass",
    _END: "ends the micro-batch",
    _LEFT: "has left the loop over the micro-batches early (break, return or an exception)",
    _SKIPPED: "skips the micro-batches of the step",
}
_KEPT_MICRO_BATCHES: Final = 256  # over NCCL, other ranks may be ahead by some


class PassOrder:
    """Whether every rank makes the same forward and backward passes of a sharded model: FSDP communicates in each.

    A rank compares a sequence of passes in a micro-batch with the other ranks when it makes it for the first time,
    before the collectives of the pass start. It knows the sequences that all ranks have made, so later steps compare
    nothing. A rank that deviates from them waits for the others to do the same, or until one has done something else.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model, self._comm = model, comm
        self._name = f"the passes of model {len(comm.board.reports)}"
        self._known: dict[int, dict[str, Any]] = {}  # for each loop over a step, the passes as a tree of sequences
        self._next: dict[str, Any] = {}  # what may follow on the passes of this micro-batch
        # How many micro-batches there were, the same on all ranks, and the passes of this one: keys of _PASS_TEXTS.
        # One attribute, because another thread reports both.
        self._current = 0, ""
        self._earlier: deque[tuple[int, str]] = deque(maxlen=_KEPT_MICRO_BATCHES)
        self._step: Sized = ()
        self._number = self._thread = 0
        self._is_active = self._has_left = self._in_backward = False
        comm.board.reports[self._name] = self._report
        outside_of_graphs: Any = torch.compiler.disable  # as the hooks of FSDP are
        # before the hooks of FSDP, in which it communicates
        model.register_forward_pre_hook(outside_of_graphs(self._on_forward), prepend=True)
        for module in model.modules():
            if is_fsdp(module):
                module.register_forward_hook(outside_of_graphs(self._watch_backward), prepend=True)

    def __deepcopy__(self, memo: dict[int, object]) -> "PassOrder":
        """Itself: a copy of the model, such as its moving average, is not watched."""
        del memo
        return self

    def start(self, step: Sized, number: int, loop: int) -> None:
        """Start a micro-batch in a loop over a step, after the end of the one before."""
        self.end()
        micro_batch, passes = self._current
        if passes:
            self._earlier.append(self._current)
            self._current = micro_batch + 1, ""
        self._step, self._number, self._thread = step, number, threading.get_ident()
        self._next = self._known.setdefault(loop, {})
        self._is_active, self._in_backward = True, False

    def end(self) -> None:
        """End a micro-batch, if it has not ended."""
        if self._is_active or self._has_left:
            left, self._is_active, self._has_left = self._has_left, True, False
            self._add(_LEFT if left else _END)
            self._is_active = False

    def leave(self) -> None:
        """Leave the loop in a micro-batch; compared later, since an exception would be lost here."""
        self._has_left = self._has_left or self._is_active
        self._is_active = False

    def close(self, step: Sized, number: int) -> None:
        """End a step, whose loop may have been left, or was not run at all."""
        if self._step is not step:
            self.start(step, number, -1)
            self._add(_SKIPPED)
            self._is_active = False
        self.end()
        self._step = ()

    def _on_forward(self, called: nn.Module, *_: object) -> None:
        if called is self._model:
            self._add("F")

    def _watch_backward(self, _: nn.Module, __: object, output: object) -> None:
        for each in tree_leaves(output) if self._is_active else ():
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(self._on_backward)

    def _on_backward(self, _: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            after_this_backward(self._after_backward)
            self._add("B")

    def _after_backward(self) -> None:
        self._in_backward = False

    def _add(self, kind: str) -> None:
        if not self._is_active:
            return
        micro_batch, passes = self._current
        self._current = micro_batch, passes + kind
        following = self._next.get(kind)
        if following is None:
            self._compare(kind)
            following = self._next.setdefault(kind, {})
        self._next = following

    def _compare(self, kind: str) -> None:
        micro_batch, passes = self._current
        position = micro_batch, len(passes) - 1
        key = "/".join(map(str, position))
        read = partial(_read_pass, position)
        reports = find_differences(self._comm, self._name, self._report, key, kind, read)
        if reports:
            others = (
                f"rank {rank} {_PASS_TEXTS[read(text)]}{_line_of_pass(position, text)}"
                for rank, text in sorted(reports.items())[:_SHOWN]
            )
            raise WrapError(self._message(kind, "; ".join(others)))

    def _message(self, kind: str, others: str) -> str:
        before = " and ".join({"F": "forward", "B": "backward"}[each] for each in self._current[1][:-1][-_SHOWN:])
        lines = _lines_of_calls("backward", self._step, self._thread)
        return (
            f"step {self._number}: rank {self._comm.world.rank} {_PASS_TEXTS[kind]} at {_line()}"
            f"{f' after {before}' if before else ''}, and {others}"
            f"{f' (the loop calls backward() at {format_list(sorted(lines), _SHOWN)})' if lines else ''}. FSDP "
            f"communicates in every pass of {type(self._model).__name__.removeprefix('FSDP')}, so all ranks must make "
            "the same forward and backward passes: decide together with run.agree(...), and multiply a loss by 0 "
            "instead of leaving out its backward()"
        )

    def _report(self) -> str:
        return json.dumps([[*self._earlier, self._current], _line()])


def _line() -> str:
    """The line of the script that runs."""
    return running_line().partition(" in ")[0]


def _read_pass(position: tuple[int, int], report: str) -> str:
    """The pass of a rank at a position, its micro-batch and the number of the pass there; nothing if not yet."""
    micro_batch, index = position
    passes = dict[int, str](json.loads(report)[0]).get(micro_batch, "")
    return passes[index : index + 1]


def _line_of_pass(position: tuple[int, int], report: str) -> str:
    """The line of that pass, if it is the last one of the rank."""
    (*_, (micro_batch, passes)), line = json.loads(report)
    return f" at {line}" if (micro_batch, len(passes) - 1) == position else ""


class SearchCost:
    """Times DDP's search for unused parameters in the first training passes, and reports the cost once.

    The search follows the inner forward pass, on the CPU: its time is that of the outer pass minus the inner.
    """

    def __init__(self, outer: DistributedDataParallel, inner: nn.Module, report: Callable[[str], None]) -> None:
        self._outer, self._inner, self._report = outer, inner, report
        self._times: list[float] = []
        self._costs: list[tuple[float, float]] = []
        self._hooks = [
            outer.register_forward_pre_hook(self._start),
            inner.register_forward_pre_hook(self._record),
            inner.register_forward_hook(self._record),
            outer.register_forward_hook(self._end),
        ]

    def __deepcopy__(self, memo: dict[int, object]) -> "SearchCost":
        """Itself: a copy of the model, such as its moving average, is not timed and must not copy the process group."""
        del memo
        return self

    def _start(self, *_: object) -> None:
        self._times = [time.perf_counter()]

    def _record(self, called: nn.Module, *_: object) -> None:
        if called is self._inner:
            self._times.append(time.perf_counter())

    def _end(self, *_: object) -> None:
        self._times.append(time.perf_counter())
        searched = self._outer.require_backward_grad_sync and torch.is_grad_enabled()
        if len(self._times) != 4 or not searched:  # the inner model was called directly, or gradients are not reduced
            return
        start, inner_start, inner_end, end = self._times
        self._costs.append(((end - start) - (inner_end - inner_start), end - start))
        if len(self._costs) == _TIMED_PASSES:
            cost, forward = (statistics.median(times) for times in zip(*self._costs, strict=True))
            for hook in self._hooks:
                hook.remove()
            self._report(
                f"unused_parameters='allow': the search for unused parameters takes {1000 * cost:.2f} ms per step "
                f"({cost / forward:.0%} of the forward pass); whether a parameter is skipped depends on the number of "
                "ranks"
            )


def _second_pass_message(step: Sized, number: int, where: str, here: bool = True) -> str:
    """Which backward passes are too many on which ranks, and what to do."""
    lines = _lines_of_calls("backward", step, threading.get_ident()) if here else []
    return (
        f"step {number} had a second backward pass after one forward pass on {where}"
        f"{f' (backward() at {format_list(lines, _SHOWN)})' if lines else ''}: DDP reduces only the first, and all "
        "ranks must average the second; add the losses and call backward() once, or call it twice on every rank in "
        "every step"
    )


def unused_message(model: nn.Module, missing: Sequence[str], step: int, samples: Sequence[int], rank: int) -> str:
    """Which parameters were not used, for which samples, and what to do."""
    shown = format_list(missing, _SHOWN)
    which = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    return (
        f"step {step} did not use {len(missing)} parameter(s) of {_common_module(model, missing)} on rank {rank}: "
        f"{shown}. The samples that took the other branch are {which}. Other ranks would wait for these gradients, and "
        "whether an optimizer skips them would depend on the number of ranks. Use them at every step (for dropped "
        "conditioning: samestep.nn.ConditioningDropout), freeze what never trains (parameter.requires_grad_(False)), "
        "or accept the search and its cost: run.wrap(model, unused_parameters='allow')"
    )


def _common_module(model: nn.Module, names: Sequence[str]) -> str:
    """The smallest module that contains all of `names`."""
    common = commonprefix([name.split(".")[:-1] for name in names])  # noqa: RUF071  # of lists, by component
    module = model.get_submodule(".".join(common))
    return f"{type(module).__name__} at {'.'.join(common)!r}" if common else type(module).__name__


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
    lines = _lines_of_calls("zero_grad", step, thread)
    found = f"{lines[0]} resets the gradients" if lines else "the gradients were reset (by zero_grad()?)"
    return (
        f"{found} inside the loop over the micro-batches of step {number}, so those of its earlier micro-batches "
        f"are lost: the step has {len(step)} micro-batches{halved_note()}, whose gradients add up; call zero_grad() "
        "after the loop, after optimizer.step()"
    )


def _lines_of_calls(method: str, step: Sized, thread: int) -> list[str]:
    """The lines of the script that call a method inside the loop over `step`, as `train.py:31`; best effort."""
    # the thread of the training loop: on a GPU, hooks run in a thread of the backward pass
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  # public in spite of its name
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OTHER_CODE):
            loop = _loop_over(step, frame)
            region = loop if loop is not None else _definition(frame.f_code, frame.f_lineno)
            found = _lines_in(region, frame.f_code, method) if region is not None else []
            if loop is not None:
                return found or _lines_in_callees(loop, frame, method)
            if found:
                return found
        frame = frame.f_back
    return []


def _lines_in(region: ast.AST, code: CodeType, method: str) -> list[str]:
    """The lines of a region of the code's file that call a method of this name."""
    return [
        f"{Path(code.co_filename).name}:{call.lineno}"
        for call in _calls(region)
        if isinstance(call.func, ast.Attribute) and call.func.attr == method
    ]


def _lines_in_callees(loop: ast.For, frame: FrameType, method: str) -> list[str]:
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
            if definition is not None and (found := _lines_in(definition, called.__code__, method)):
                return found
    return []


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
