"""The only module that uses private torch API, or API whose name differs between torch versions."""

import inspect
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:  # they take most of a second to import
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

GAMMA_DRAWS = torch._standard_gamma, torch._sample_dirichlet  # pyright: ignore[reportPrivateUsage]
"""What torch.distributions draws for Gamma, Beta, Dirichlet, Chi2 and StudentT."""


def is_dtensor(tensor: object) -> "TypeIs[DTensor]":
    """Whether a tensor is sharded."""
    return is_instance(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp(module: object) -> "TypeIs[FSDPModule]":
    """Whether `fully_shard` was called for a module."""
    return is_instance(module, "torch.distributed.fsdp", "FSDPModule")


def unsharded_class(kind: type) -> type:
    """The class of a module before `fully_shard`, which replaces it by a subclass of FSDPModule and that class."""
    return kind.__bases__[1]


def is_fsdp1(module: object) -> bool:
    """Whether a module is a FullyShardedDataParallel."""
    return is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def count_changes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, by which autograd knows it, too."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def is_instance(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a class; without its module, which takes long to import, there is none."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def set_group_timeout(seconds: float, group: dist.ProcessGroup) -> None:
    """Change the timeout of later collectives of `group`; the public API sets it only at creation."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # pyright: ignore[reportPrivateUsage]


def small_nccl_options(timeout: timedelta) -> Any:
    """Options of a process group over NCCL for scalars: one block of threads.

    torch warns if the options do not repeat the timeout that `new_group` gets.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
    return options


def collective_counts(name: str) -> dict[str, tuple[int, float]]:
    """For each process group with the backend `name`: how many collectives this rank has called, and the timeout.

    The count of NCCL includes collectives that wait for the GPU or for other ranks, and point-to-point calls, which
    some ranks of the group may make without the others. The timeout is in seconds.
    """
    counts = dict[str, tuple[int, float]]()
    for group in list(distributed_c10d._world.pg_map):  # pyright: ignore[reportPrivateUsage]
        with suppress(RuntimeError):  # another thread destroys this group
            for device in group._device_types:  # pyright: ignore[reportPrivateUsage]
                backend: Any = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
                if backend.name() == name:
                    timeout: timedelta = backend.options._timeout
                    counts[group.group_name] = backend._get_sequence_number_for_group(), timeout.total_seconds()
    return counts


def nccl_waits() -> bool | None:
    """Whether this rank has called a collective over NCCL that is not complete; None if the flight recorder is off."""
    dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    try:
        groups = json.loads(dump(False, False)).get("pg_status", {}) if dump is not None else {}
        statuses = [
            (int(each["last_enqueued_collective"]), int(each["last_completed_collective"])) for each in groups.values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # another version of torch
        return None
    return any(called > complete for called, complete in statuses) if statuses else None


def wait_until_released(tensor: torch.Tensor, seconds: float = 5.0) -> None:
    """Wait until gloo's thread has released a tensor that it sent, before the group is destroyed.

    The thread releases it while it holds the group's lock, and needs the GIL for that. A thread that destroys the group
    meanwhile, or collects the last wrapper that refers to it, holds the GIL and needs the group's lock: a deadlock.
    """
    deadline = time.monotonic() + seconds
    while tensor._use_count() > 1 and time.monotonic() < deadline:  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.0005)


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Exclude these parameters and buffers from DistributedDataParallel: they are frozen."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))  # pyright: ignore[reportPrivateUsage]


def no_buffer_broadcast() -> dict[str, bool]:
    """The DistributedDataParallel option that keeps its forward pass free of collectives, by its name in this torch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply every tensor in place, in few kernels. A factor on the device is not read by the host."""
    if isinstance(factor, torch.Tensor):
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, each in by_dtype.items():
            torch._foreach_mul_(each, factor.to(each[0].device, dtype))  # pyright: ignore[reportPrivateUsage]
    elif tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateUsage]


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The unsharded parameters that FSDP computes with, by name; they exist from the first forward pass on."""
    found = {param._param_fqn: getattr(param, "_unsharded_param", None) for param in _fsdp_parameters(model)}
    return {name: full for name, full in found.items() if name is not None and full is not None}


def matrix_product_shape(node: torch.autograd.graph.Node) -> tuple[int, int] | None:
    """The shape of the product that this node of the autograd graph computed; None if it is another operation."""
    if node.name() not in ("MmBackward0", "BmmBackward0", "CdistBackward0"):
        return None
    if node.name() == "CdistBackward0":
        first, second = node._saved_x1.shape, node._saved_x2.transpose(-1, -2).shape  # pyright: ignore[reportAttributeAccessIssue]
    elif node.name() == "MmBackward0":
        first, second = node._saved_self_sym_sizes, node._saved_mat2_sym_sizes  # pyright: ignore[reportAttributeAccessIssue]
    else:
        operands = node._saved_self, node._saved_mat2  # pyright: ignore[reportAttributeAccessIssue]
        if operands[0] is None or operands[1] is None:  # torch keeps no operand for the gradient of a frozen one
            return None
        first, second = operands[0].shape, operands[1].shape
    return None if len(first) == 3 and first[0] != 1 else (int(first[-2]), int(second[-1]))


def class_labels(node: torch.autograd.graph.Node) -> torch.Tensor | None:
    """The labels of the cross entropy that this node of the autograd graph computed; None for another operation."""
    return node._saved_target if node.name() == "NllLossBackward0" else None  # pyright: ignore[reportAttributeAccessIssue]


def drop_gathered_gradients(model: nn.Module) -> None:
    """Drop the gradients that FSDP keeps on unsharded parameters until the last micro-batch reduces them."""
    for param in _fsdp_parameters(model):
        param.unsharded_accumulated_grad = None
        if (full := getattr(param, "_unsharded_param", None)) is not None:
            full.grad = None


def after_this_backward(function: Callable[[], None]) -> None:
    """Call `function` when this backward pass has ended, after the callbacks in which DDP and FSDP reduce gradients."""
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    queue(lambda: queue(function))


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward pass that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def around_reduction(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around the callbacks in which DDP and FSDP wait for the gradients of other ranks.

    To be called when this backward pass begins: DDP and FSDP queue their callbacks later.
    """

    def first() -> None:
        before()
        after_backward(after)

    after_backward(first)


def copy_without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model that FSDP has sharded, as it was before: its sharded parameters are on the meta device.

    torch cannot copy such a model. Its class, its hooks and its registry entries are those of FSDP, and are left out.
    """
    sharded: dict[Any, type[nn.Module]] = {each: type(each) for each in model.modules() if is_fsdp(each)}
    states = [each._get_fsdp_state() for each in sharded]
    memo: dict[int, object] = {id(state): state for state in states}
    for parameter in model.parameters():
        if is_dtensor(parameter):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    try:
        for each, kind in sharded.items():
            each.__class__ = unsharded_class(kind)
        copied = deepcopy(model, memo)
    finally:
        for each, kind in sharded.items():
            each.__class__ = kind
    for each in copied.modules():
        for name in [name for name in vars(each) if name.startswith("__composable_api_state_key")]:
            del vars(each)[name]
        for hooks in (each._forward_pre_hooks, each._forward_hooks):  # pyright: ignore[reportPrivateUsage]
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) in states]:
                del hooks[key]
    return copied


def replace_tensors(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer by what `function` returns for it; `to_empty` would replace all."""
    model._apply(function)  # pyright: ignore[reportPrivateUsage]


def reduce_unused_as_zeros(model: "FSDPModule") -> None:
    """Let ranks that did not use a parameter reduce zeros for it; before torch 2.13 the other ranks hang."""
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if is_fsdp(module):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has a single group
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from group.fsdp_params if group is not None else ()


@contextmanager
def without_memory() -> Generator[None]:
    """Create and compute fake tensors, which have a shape and no memory; real tensors may be used together with them.

    torch's logger would print every operation that fails with its full stack, next to the exception.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def with_memory() -> AbstractContextManager[object]:
    """Compute with real tensors again inside of `without_memory()`."""
    return unset_fake_temporarily()


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake."""
    return isinstance(tensor, FakeTensor)


def cannot_be_traced(error: BaseException) -> bool:
    """Whether an error says that the value of a fake tensor was needed."""
    known = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,  # an operator without a fake kernel, as of an extension
    )
    # torch has no exception class for these: the tensor was passed to numpy, or to a library by its address
    messages = (".numpy() is not supported for tensor subclasses", "Cannot access data pointer of Tensor")
    return isinstance(error, known) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in messages)
    )


class OtherKernels:
    """Replaces kernels in torch's dispatch table until it is closed."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, name: str, kernel: Callable[..., object], key: str) -> None:
        """Call `kernel` for the operator `name` under the dispatch key `key`."""
        with warnings.catch_warnings():  # torch warns about every kernel that is replaced
            warnings.simplefilter("ignore")
            self._library.impl(name, kernel, key, allow_override=True)  # torch 2.11 refuses it by default

    def close(self) -> None:
        """Restore torch's kernels."""
        self._library._destroy()  # pyright: ignore[reportPrivateUsage]


def has_kernel(name: str, key: str) -> bool:
    """Whether torch has a kernel for the operator `name` under the dispatch key `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)  # pyright: ignore[reportPrivateUsage]


def past_cpu_autocast() -> AbstractContextManager[object]:
    """Call operators without CPU autocast, inside of this context manager."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # pyright: ignore[reportPrivateUsage]
    return torch._C._ExcludeDispatchKeyGuard(keys)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def vmap_randomness() -> str | None:
    """The `randomness=` of the innermost torch.vmap around this call, or None outside of torch.vmap."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    transforms = functorch.get_interpreter_stack() or ()
    inner = [each for each in transforms if each.key() == functorch.TransformType.Vmap]
    return functorch.CVmapInterpreterPtr(inner[-1]).randomness().name.lower() if inner else None


def is_entered(mode: TorchFunctionMode) -> bool:
    """Whether a torch function mode is entered, also after an exception that came between."""
    modes: Any = torch.overrides._get_current_function_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return any(each is mode for each in modes)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by torch.compile(module) or by module.compile()."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def without_override_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not ask for overrides, so that a mode sees the calls inside it.

    Every function of torch that can be overridden starts with the question whether a mode is active. If the mode calls
    the function again, the answer is yes again.
    """
    if not isinstance(function, FunctionType):
        return function
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, _no_override)}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_override(*_: object) -> bool:
    return False


def dispatch_in_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo ask a TorchFunctionMode for these functions too, as eager torch does; its own list lacks some.

    The mode may count inside of activation checkpointing: Dynamo traces such a layer once, for both passes.
    """
    from torch._dynamo import config
    from torch._dynamo.variables.torch import get_overridable_functions  # pyright: ignore[reportPrivateImportUsage]

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    get_overridable_functions().update(functions)


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo trace `function` as a part of others, but never compile it by itself."""
    from torch._dynamo.eval_frame import skip_code  # not above: importing Dynamo takes seconds

    skip_code(function.__code__)
