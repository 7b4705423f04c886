"""What run.teacher may be told: the words for placements, and which option means something to which of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any, Final, Protocol, TypedDict

import torch

from samestep.distributed.communicator import Communicator
from samestep.errors import TeacherError
from samestep.planner.teacher_costs import TeacherSetup


@dataclass(frozen=True)
class Ground:
    """The run as a teacher sees it."""

    link: Communicator
    """The other ranks."""
    device: torch.device
    """Where this rank trains, and where outputs must lie."""
    folder: Path
    """Where the run's files lie, the same on every rank."""
    say: Callable[[str], None]
    """Prints once, on the first rank."""
    once: Callable[..., object]
    """Runs a function on the first rank and gives its result, or its exception, to all: `Run.once`."""
    setting: Callable[[int], TeacherSetup] | None = None
    """Tells what trains around the teacher, with so many ranks on a device; None where no placement is to be chosen."""


class PlacementOptions(TypedDict, total=False):
    """What of run.teacher(...) means something to one or two placements only; TeacherOptions says what."""

    device_map: Mapping[str, str] | None
    servers: int | None
    inner: str | None
    cache: str | Path | None


@dataclass(frozen=True)
class TeacherOptions:
    """What the user asked for in run.teacher(...), beside what is to be built."""

    dtype: torch.dtype | None = None
    """What the weights are turned into; None: as the file holds them."""
    top_k: int | None = None
    """How many of the largest logits are given, and sent or kept; None: all."""
    temperature: float = 1.0
    """The temperature of the loss that top-k logits are for; without `top_k` it changes nothing."""
    example: object = None
    """A batch such as the teacher will be called with, to count its work; None: what `build` returns beside it."""
    device_map: Mapping[str, str] | None = None
    """Modules and their devices, for `custom`."""
    servers: int | None = None
    """How many ranks or processes hold the teacher, for `served`; None: one."""
    inner: str | None = None
    """What is inside: for `cached` the placement that computes what is missing, None: chosen; for `served` "rank" or
    "process", None: ranks serve."""
    cache: str | Path | None = None
    """Where outputs are kept, for `cached`; None: in the run's folder."""


class PlacedTeacher(Protocol):
    """A teacher in its place: called like the module itself, on every rank for its own micro-batch."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs for this rank's inputs, on this rank's device."""
        ...

    def describe(self) -> str:
        """One line for the log: where the weights lie and how many bytes of them on this rank."""
        ...

    def close(self) -> None:
        """Give back what is held: memory, threads, processes; called on every rank when the run ends."""
        ...


class PendingOutputs(Protocol):
    """Outputs that were asked for and may still be on their way."""

    def result(self) -> Any:
        """The outputs, on this rank's device; waits for them where they are not there yet."""
        ...


_HERE: Final = "samestep.teacher"
# Each in a module of its own, which is loaded when it is asked for.
PLACEMENTS: Final[dict[str, str]] = {
    "gpu": f"{_HERE}.whole:place_on_device",
    "cpu": f"{_HERE}.whole:place_in_host_memory",
    "balanced": f"{_HERE}.spread:place_balanced",
    "sequential": f"{_HERE}.spread:place_sequential",
    "custom": f"{_HERE}.spread:place_custom",
    "offload": f"{_HERE}.streamed:place_offloaded",
    "disk": f"{_HERE}.streamed:place_on_disk",
    "sharded": f"{_HERE}.sharded:place",
    "served": f"{_HERE}.served:place",
    "cached": f"{_HERE}.cached:place",
}
"""Where the function of each placement is found."""
_WORDS: Final = ("auto", *PLACEMENTS)
_LISTED: Final = ", ".join(_WORDS)

# What other libraries call these, or what people type for them.
_RIGHT_WORDS: Final[dict[str, str]] = {
    "cuda": "gpu",
    "device": "gpu",
    "none": "auto",
    "ram": "cpu",
    "host": "cpu",
    "shared": "cpu",
    "balanced_low_0": "balanced",
    "manual": "custom",
    "device_map": "custom",
    "cpu_offload": "offload",
    "stream": "offload",
    "nvme": "disk",
    "ssd": "disk",
    "disk_offload": "disk",
    "fsdp": "sharded",
    "server": "served",
    "remote": "served",
    "cache": "cached",
}
_DTYPES: Final[dict[str, str]] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_INSIDE: Final[dict[str, tuple[str, ...]]] = {
    "served": ("rank", "process"),
    "cached": tuple(name for name in PLACEMENTS if name not in ("cached", "custom")),
}
"""What `inner=` may be."""


def check_placement_options(given: Mapping[str, object]) -> None:
    """Refuse a keyword that run.teacher does not take."""
    known = ("weights", "placement", "dtype", "top_k", "temperature", "example", *PlacementOptions.__annotations__)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}=? " if near else ""
            raise TeacherError(f"run.teacher takes no {name}=: {meant}beside build it takes {', '.join(known)}")


def check_wish(placement: str | None, wish: TeacherOptions) -> None:
    """Refuse a word that is none, telling the right one, and every option that would go unused or has no meaning."""
    _check_placement(placement, wish)
    _check_inner(placement, wish)
    servers_of = "served" if placement == "cached" and wish.inner == "served" else placement
    if wish.servers is not None and servers_of != "served":
        raise _unused("servers", wish.servers, placement, "placement='served'")
    if wish.cache is not None and placement != "cached":
        raise _unused("cache", wish.cache, placement, "placement='cached'")
    if wish.cache is not None:
        _check_path("cache", wish.cache, "a folder, such as cache='outputs'")
    for name, count in (("servers", wish.servers), ("top_k", wish.top_k)):
        _check_count(name, count)
    _check_temperature(wish.temperature)
    _check_dtype(wish.dtype)


def asked_for(placement: str | None, wish: TeacherOptions) -> dict[str, str]:
    """What all ranks must ask for alike: each may have devices of its own in a map, and the first one's folder counts.

    >>> asked_for("cpu", Wish())["placement"]
    "'cpu'"
    """
    names = ("dtype", "top_k", "temperature", "servers", "inner")
    return {"placement": repr(placement or "auto"), **{name: repr(getattr(wish, name)) for name in names}}


def check_weights(weights: object) -> None:
    """Refuse what is no path."""
    if weights is not None:
        _check_path("weights", weights, "the path of a .safetensors file, a folder of shards, or a Hugging Face folder")


def _check_placement(placement: str | None, wish: TeacherOptions) -> None:
    if isinstance(wish.device_map, str):
        right = _right_word(wish.device_map)
        meant = f"placement= is one of {_LISTED}" if right is None else f"say placement={right}"
        raise TeacherError(
            f"device_map={wish.device_map!r} is one word: {meant}; device_map= is a dict of modules and devices, for "
            "placement='custom'"
        )
    _check_kind("placement", placement, str)
    _check_kind("device_map", wish.device_map, Mapping)
    if placement is not None and placement not in PLACEMENTS:
        right = _right_word(placement)
        meant = "" if right is None else f"say placement={right}; "
        raise TeacherError(f"placement={placement!r} is no placement: {meant}there are {_LISTED}")
    if wish.device_map is not None and placement not in (None, "custom"):
        raise TeacherError(f"placement={placement!r} takes no device_map: use placement='custom', or leave it out")


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise TeacherError(
            f"{name}= got a {type(given).__name__}: placement= is a word, one of {_LISTED}; "
            "device_map= is a dict of modules and devices, for placement='custom'"
        )


def _check_inner(placement: str | None, wish: TeacherOptions) -> None:
    if wish.inner is None:
        return
    if placement not in _INSIDE:
        raise _unused("inner", wish.inner, placement, "placement='served' ('rank' or 'process') and 'cached'")
    if wish.inner not in _INSIDE[placement]:
        choices = ", ".join(map(repr, _INSIDE[placement]))
        raise TeacherError(f"placement={placement!r} does not know inner={wish.inner!r}: use one of {choices}")


def _unused(option: str, value: object, placement: str | None, right: str) -> TeacherError:
    here = "without placement=" if placement is None else f"with placement={placement!r}"
    shown = str(value) if isinstance(value, Path) else value
    return TeacherError(f"{option}={shown!r} means nothing {here}: it is for {right}; say that, or leave {option}= out")


def _check_count(name: str, count: object) -> None:
    if count is not None and (not isinstance(count, int) or count is True or count < 1):
        other = "; a process of its own serves with inner='process'" if name == "servers" else ""
        raise TeacherError(f"{name}={count!r} is no count: give a whole number from 1 on, or leave it out{other}")


def _check_temperature(temperature: object) -> None:
    if not isinstance(temperature, Real) or not 0 < float(temperature) < math.inf:
        raise TeacherError(f"run.teacher got temperature={temperature!r}: give a number above 0, such as 2.0")


def _check_path(name: str, path: object, wanted: str) -> None:
    if not isinstance(path, str | Path) or not str(path):
        told = "is empty" if isinstance(path, str) else f"got a {type(path).__name__}"
        raise TeacherError(f"{name}= {told}: give {wanted}")


def _check_dtype(dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        word = str(dtype).removeprefix("torch.")
        right = _DTYPES.get(word, word)
        known = isinstance(getattr(torch, right, None), torch.dtype)
        raise TeacherError(f"dtype={dtype!r} is no dtype of torch: say dtype=torch.{right if known else 'bfloat16'}")
    if not dtype.is_floating_point:
        raise TeacherError(f"dtype={dtype} holds no fractions: use torch.bfloat16, torch.float16 or torch.float32")


def _right_word(typed: str) -> str | None:
    """What was meant by a word, as it is to be typed: the same written otherwise, another library's, or a near one."""
    word = typed.strip().lower().partition(":")[0].replace("-", "_")
    near = [word] if word in _WORDS else get_close_matches(word, _WORDS, n=1)
    right = _RIGHT_WORDS.get(word, near[0] if near else None)
    return None if right is None else repr(right)
