"""Let a script that names GPUs run on the CPU: "cuda" means the CPU, and NCCL means gloo.

torch.cuda.is_available() stays False, so that a script with a way for the CPU takes it. If a script ends because it
finds no GPU, or starts a single rank, `samestep verify` starts it again with `claims_cuda`: then there are as many GPUs
as ranks.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from samestep.verify.recorder.recorder import Recorder

FACTORIES: Final = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "as_tensor",
    "normal", "scalar_tensor", "logspace", "tril_indices", "triu_indices",
)  # fmt: skip
TENSOR_FACTORIES: Final = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
# Functions of torch.cuda that a script may call to no effect, and what they return.
_NOTHING: Final = (
    "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "init",
    "ipc_collect", "set_stream", "reset_max_memory_allocated", "set_per_process_memory_fraction",
)  # fmt: skip
_ZERO: Final = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def use_cpu(recorder: Recorder) -> None:
    """Map every request for a GPU to the CPU from now on; the first one is recorded."""
    mapping = _Mapping(recorder)
    for name in FACTORIES:
        setattr(torch, name, mapping.factory(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(Tensor, name, mapping.factory(getattr(Tensor, name)))
    Tensor.to, nn.Module.to = mapping.moving(Tensor.to), mapping.moving(nn.Module.to)  # pyright: ignore
    Tensor.cuda, nn.Module.cuda = mapping.staying(), mapping.staying()  # pyright: ignore
    Tensor.pin_memory = mapping.staying(silently=True)  # pyright: ignore
    torch.load = mapping.loading(torch.load)
    mapping.replace_cuda()


class _Mapping:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._is_noted, self._has_queried = recorder, False, False

    def note(self) -> None:
        """Record that the script asked for a GPU."""
        if not self._is_noted and not self._recorder.is_quiet:
            self._is_noted = True
            self._recorder.write("mapped", site=self._recorder.site(2))

    def factory(self, original: Callable[..., Any]) -> Any:
        """Let a function that creates a tensor create it on the CPU."""

        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            if _is_gpu(kwargs.get("device")):
                self.note()
                kwargs["device"] = "cpu"
            return original(*args, **kwargs)

        return create

    def moving(self, original: Callable[..., Any]) -> Any:
        """Let `to` leave a tensor or a module on the CPU."""

        @wraps(original)
        def move(own: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_gpu(kwargs.get("device")) or any(_is_gpu(each) for each in args[:1]):
                self.note()
                args = ("cpu", *args[1:]) if args and _is_gpu(args[0]) else args
                kwargs = {**kwargs, "device": "cpu"} if _is_gpu(kwargs.get("device")) else kwargs
            return original(own, *args, **kwargs)

        return move

    def staying(self, silently: bool = False) -> Any:
        """Return a method that returns its object; `silently` if it says nothing about GPUs."""

        def stay(own: Any, *args: Any, **kwargs: Any) -> Any:
            if not silently:
                self.note()
            return own

        return stay

    def loading(self, original: Callable[..., Any]) -> Any:
        """Let torch.load map GPUs to the CPU."""

        @wraps(original)
        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _is_gpu(map_location) or isinstance(map_location, dict):
                map_location = "cpu"
            return original(file, map_location, *args, **kwargs)

        return load

    def _set_device(self, *args: Any) -> None:
        self.note()

    def _answer(self, value: Any) -> Callable[..., Any]:
        """Return a function that says how many GPUs there are; a script that asks may need them."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            recorder, caller = self._recorder, sys._getframe(1).f_code  # pyright: ignore[reportPrivateUsage]
            if not self._has_queried and not recorder.is_quiet and recorder.is_user_code(caller):
                self._has_queried = True
                recorder.write("asked_for_gpus", site=recorder.site())
            return value

        return answer

    def replace_cuda(self) -> None:
        """Let torch.cuda and torch.accelerator return what a CPU has."""
        cuda: Any = torch.cuda
        settings = self._recorder.settings
        size = settings.size if settings.claims_cuda or settings.spawns else 0
        if settings.claims_cuda and not settings.spawns:  # as many as for all ranks, also for one
            size = settings.reference.get("size", size)
        for name in _NOTHING:
            setattr(cuda, name, _returning(None))
        cuda.set_device = self._set_device
        for name in _ZERO:
            setattr(cuda, name, _returning(0))
        cuda.device_count = self._answer(size)
        cuda.is_available = self._answer(settings.claims_cuda)
        cuda.is_bf16_supported = _returning(False)
        cuda.get_device_name = _returning("CPU")
        cuda.get_device_properties = _returning(_Properties())
        cuda.get_device_capability = _returning((9, 0))
        cuda.Stream = cuda.Event = _Stream
        cuda.stream = _returning(nullcontext())
        cuda.current_stream = cuda.default_stream = _returning(_Stream())
        cuda.device = _Device
        accelerator: Any = torch.accelerator
        accelerator.is_available = self._answer(settings.claims_cuda)
        accelerator.device_count = self._answer(size)
        accelerator.current_accelerator = _returning(torch.device("cuda") if settings.claims_cuda else None)
        accelerator.set_device_index = accelerator.set_device_idx = self._set_device
        accelerator.current_device_index = accelerator.current_device_idx = _returning(0)
        accelerator.device_index = _Device
        accelerator.current_stream = _returning(_Stream())  # Adam asks it whether a graph is captured
        for name in ("synchronize", "set_stream", "empty_cache", "reset_peak_memory_stats"):
            setattr(accelerator, name, _returning(None))
        for name in _ZERO[1:]:
            setattr(accelerator, name, _returning(0))
        torch.autocast = torch.amp.autocast = _Autocast  # pyright: ignore
        cuda.amp.autocast = _Autocast
        cuda.amp.GradScaler = torch.amp.GradScaler = _Scaler  # pyright: ignore


class _Autocast(torch.autocast):
    """Without effect: 16 bits are slow on the CPU, and some CPUs lack them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", enabled=False)


class _Scaler(torch.amp.GradScaler):
    """Without effect, as on a CPU without 16 bits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", enabled=False)


class _Device(nullcontext[None]):
    def __init__(self, device: Any) -> None:
        super().__init__()


class _Properties:
    name, total_memory, major, minor, multi_processor_count = "CPU", 2**34, 9, 0, 1


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _returning(0.0)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None: ...


def _returning(value: Any) -> Callable[..., Any]:
    """Return a function that ignores its arguments."""

    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def _is_gpu(device: Any) -> bool:
    if isinstance(device, bool) or device is None or isinstance(device, Tensor):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
