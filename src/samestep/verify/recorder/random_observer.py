"""Which random numbers a rank draws in its training loop, and how it seeds its generators."""

import hashlib
import random
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from samestep.verify.recorder.fingerprints import hash_tensor
from samestep.verify.recorder.recorder import Frame, Recorder

TORCH_DRAWS: Final = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli",
    "multinomial", "poisson",
)  # fmt: skip
TENSOR_DRAWS: Final = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "geometric_")
NUMPY_DRAWS: Final = ("rand", "randn", "randint", "random", "normal", "uniform", "choice", "permutation", "beta")
_MAX_DRAWS: Final = 2000


class RandomObserver:
    """Follows the draws that user code makes while it trains, and every seed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._draws = 0

    def install(self) -> None:
        """Observe draws and seeds from now on."""
        for name in TORCH_DRAWS:
            setattr(torch, name, self._observe(name, getattr(torch, name)))
        for name in TENSOR_DRAWS:
            setattr(Tensor, name, self._observe(name, getattr(Tensor, name)))
        torch.manual_seed = torch.random.manual_seed = self._observe_seed("torch.manual_seed", torch.manual_seed)
        random.seed = self._observe_seed("random.seed", random.seed)  # pyright: ignore
        torch.set_rng_state = self._observe_seed("torch.set_rng_state", torch.set_rng_state)
        try:
            import numpy
        except ImportError:
            return
        for name in NUMPY_DRAWS:
            setattr(numpy.random, name, self._observe(f"numpy.{name}", getattr(numpy.random, name)))
        numpy.random.seed = self._observe_seed("numpy.random.seed", numpy.random.seed)  # pyright: ignore

    def _observe(self, name: str, original: Callable[..., Any]) -> Any:
        @_like(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            recorder = self._recorder
            is_initialization = name.endswith("_") and not recorder.steps  # of the weights of a model
            if self._draws < _MAX_DRAWS and not is_initialization and (not recorder.is_quiet or self._is_in_worker()):
                frames = recorder.user_frames(_caller())
                if frames:
                    self._draws += 1
                    self._write(
                        "draw", frames, name=name, generator=kwargs.get("generator") is not None, **_describe(result)
                    )
            return result

        return draw

    def _observe_seed(self, name: str, original: Callable[..., Any]) -> Any:
        @_like(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            recorder, caller = self._recorder, _caller()
            is_state = name == "torch.set_rng_state"  # torch calls it as well, to repeat a forward pass
            is_observed = not recorder.is_quiet or self._is_in_worker()
            if is_observed and (not is_state or recorder.is_user_code(caller.f_code)):
                value = args[0] if args else next(iter(kwargs.values()), None)
                value = hash_tensor(value) if isinstance(value, Tensor) else value
                frames = recorder.user_frames(caller)
                self._write("seed", frames, name=name, value=str(value))
            return original(*args, **kwargs)

        return seed

    def _is_in_worker(self) -> bool:
        """Whether this is a data worker, which its rank has forked."""
        return not self._recorder.is_own_process and get_worker_info() is not None

    def _write(self, kind: str, frames: list[Frame], **values: Any) -> None:
        recorder = self._recorder
        if recorder.is_own_process:
            recorder.write(kind, site=recorder.number(tuple(frames)), **values)
        elif (info := get_worker_info()) is not None:
            recorder.write_from_worker(info.id, k=kind, frames=frames, **values)


def _like(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Let a function look like another one, also like a method of a generator."""

    def decorate(function: Callable[..., Any]) -> Any:
        replacement: Any = wraps(original)(function)
        owner: Any = getattr(original, "__self__", None)
        if owner is not None:
            replacement.__self__ = owner
        return replacement

    return decorate


def _caller() -> Any:
    import sys

    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


def _describe(result: Any) -> dict[str, Any]:
    if isinstance(result, Tensor):
        return {"shape": list(result.shape), "hash": hash_tensor(result)}
    shape = list(getattr(result, "shape", []))
    data = result.tobytes() if hasattr(result, "tobytes") else repr(result).encode()
    return {"shape": shape, "hash": hashlib.blake2b(data, digest_size=8).hexdigest()}
