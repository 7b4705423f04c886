"""What torch does not offer in public yet, or offers by other names in other versions; wrapped here alone."""

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

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
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def set_group_timeout(seconds: float, group: dist.ProcessGroup) -> None:
    """Give every later collective of `group` this long; torch only lets the timeout be named at the start."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # pyright: ignore[reportPrivateUsage]


def wait_until_released(tensor: torch.Tensor, seconds: float = 5.0) -> None:
    """Wait until gloo's thread has let go of a tensor that it has sent, before the group is destroyed.

    That thread lets go with the group's lock in hand and wants Python's for it. Whoever destroys the group meanwhile,
    or collects the last wrapper that knows it, has Python's and wants the group's: both would wait forever.
    """
    deadline = time.monotonic() + seconds
    while tensor._use_count() > 1 and time.monotonic() < deadline:  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.0005)


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Keep DistributedDataParallel from sending these parameters and buffers around: they do not train."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))  # pyright: ignore[reportPrivateUsage]


def no_buffer_broadcast() -> dict[str, bool]:
    """The option by which this torch keeps the forward pass of DistributedDataParallel free of collectives."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply every tensor in place, in few kernels however many there are."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateUsage]


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The whole parameters that FSDP computes with, by name; they exist from the first forward pass on."""
    found = {param._param_fqn: getattr(param, "_unsharded_param", None) for param in _fsdp_parameters(model)}
    return {name: whole for name, whole in found.items() if name is not None and whole is not None}


def drop_gathered_gradients(model: nn.Module) -> None:
    """Forget the gradients that FSDP keeps on whole parameters until the last micro-batch sends them around."""
    for param in _fsdp_parameters(model):
        param.unsharded_accumulated_grad = None
        if (whole := getattr(param, "_unsharded_param", None)) is not None:
            whole.grad = None


def reduce_unused_as_zeros(model: FSDPModule) -> None:
    """Let ranks that did not use a parameter send zeros for it; before torch 2.13 the others wait for them in vain."""
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 knows one group only
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from group.fsdp_params if group is not None else ()


@contextmanager
def without_memory() -> Generator[None]:
    """Let tensors be made and computed with by shape alone; those that have memory already may take part.

    Torch logs every operation that fails so with its whole stack, beside the exception that is raised and told.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def with_memory() -> AbstractContextManager[object]:
    """Compute with memory again inside of `without_memory()`."""
    return unset_fake_temporarily()


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a shape alone."""
    return isinstance(tensor, FakeTensor)


def cannot_be_traced(error: BaseException) -> bool:
    """Whether an error says that values were asked of tensors that are shapes alone."""
    known = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,  # one without a rule for shapes, as of an extension
    )
    # torch has no class of its own for these two: the tensor was handed to numpy, or to a library by its address
    told = (".numpy() is not supported for tensor subclasses", "Cannot access data pointer of Tensor")
    return isinstance(error, known) or (isinstance(error, RuntimeError) and any(text in str(error) for text in told))


class OtherKernels:
    """Kernels of ours in torch's table, for as long as this is open; torch's own stand again afterwards."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, name: str, kernel: Callable[..., object], key: str) -> None:
        """Let `kernel` be called where the operator `name` is met under the dispatch key `key`."""
        with warnings.catch_warnings():  # torch tells of every kernel that is replaced
            warnings.simplefilter("ignore")
            self._library.impl(name, kernel, key)

    def close(self) -> None:
        """Put torch's own back."""
        self._library._destroy()  # pyright: ignore[reportPrivateUsage]


def has_kernel(name: str, key: str) -> bool:
    """Whether torch itself has a kernel for the operator `name` under the dispatch key `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)  # pyright: ignore[reportPrivateUsage]


def past_cpu_autocast() -> AbstractContextManager[object]:
    """Call operators as if autocast of the CPU were off; only while this is open."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # pyright: ignore[reportPrivateUsage]
    return torch._C._ExcludeDispatchKeyGuard(keys)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
