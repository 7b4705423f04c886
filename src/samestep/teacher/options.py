"""The options of run.teacher(...): the placements, which option belongs to which placement, and their checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Final, Protocol, TypedDict

import torch

from samestep.errors import TeacherError


class PlacementOptions(TypedDict, total=False):
    """The options of run.teacher(...) that only one or two placements use; see TeacherOptions."""

    device_map: Mapping[str, str] | None
    servers: int | None
    inner: str | None
    cache: str | Path | None


@dataclass(frozen=True)
class TeacherOptions:
    """The options of run.teacher(...) apart from build, weights and placement."""

    dtype: torch.dtype | None = None  # of floating-point weights, which are converted; None keeps that of the file
    top_k: int | None = None  # how many of the largest logits are returned, sent and cached; None: all
    temperature: float = 1.0  # of the distillation loss that top-k logits are for; no effect without top_k
    example: object = None  # a batch to count the FLOPs of a forward pass; None: what `build` returns, if any
    device_map: Mapping[str, str] | None = None  # device by module name, for custom
    servers: int | None = None  # how many ranks or processes hold the teacher, for served; None: one
    # For cached the placement that computes missing outputs (None: chosen automatically); for served "rank" or
    # "process" (None: "rank").
    inner: str | None = None
    cache: str | Path | None = None  # the folder of the output cache, for cached; None: one in the run's folder


class PlacedTeacher(Protocol):
    """A teacher in its placement. Every rank calls it like the module itself, for its own micro-batch.

    A placement may also have `module` (the frozen module), `submit(...)` (outputs that are computed in the background)
    and `lockstep` (True if all ranks must make the same number of calls).
    """

    @property
    def description(self) -> str:
        """One line for the log: where the weights are and how many bytes of them are on this rank."""
        ...

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs for this rank's inputs, on this rank's device."""
        ...

    def close(self) -> None:
        """Free memory, threads and processes; called on every rank when the run ends."""
        ...


# The module and function that place a teacher, by placement. The module is imported when the placement is used.
PLACEMENTS: Final[dict[str, str]] = {
    "gpu": "resident:place_on_device",
    "cpu": "resident:place_in_host_memory",
    "balanced": "resident:place_balanced",
    "sequential": "resident:place_sequential",
    "custom": "resident:place_custom",
    "offload": "offload:place_offloaded",
    "disk": "offload:place_on_disk",
    "sharded": "across_ranks:ShardedTeacher",
    "served": "across_ranks:ServedTeacher",
    "cached": "output_cache:CachedTeacher",
}
_NAMES: Final = ("auto", *PLACEMENTS)
_ALL_NAMES: Final = ", ".join(_NAMES)
_DEVICE_MAP_USE: Final = "device_map= takes a dict of module names and devices, for placement='custom'"
# Names that other libraries use for these placements.
_ALIASES: Final = {
    "auto": ("none",),
    "gpu": ("cuda", "device"),
    "cpu": ("ram", "host", "shared"),
    "balanced": ("balanced_low_0",),
    "custom": ("manual", "device_map"),
    "offload": ("cpu_offload", "stream"),
    "disk": ("nvme", "ssd", "disk_offload"),
    "sharded": ("fsdp",),
    "served": ("server", "remote"),
    "cached": ("cache",),
}
_DTYPE_ALIASES: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_INNER_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "served": ("rank", "process"),
    "cached": tuple(name for name in PLACEMENTS if name not in ("cached", "custom")),
}


def check_placement_options(given: Mapping[str, object]) -> None:
    """Raise TeacherError for a keyword that run.teacher does not have."""
    known = ("weights", "placement", "dtype", "top_k", "temperature", "example", *PlacementOptions.__annotations__)
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}=? " if close else ""
            raise TeacherError(
                f"run.teacher() has no parameter {name}=: {hint}its parameters are build, {', '.join(known)}"
            )


def check_teacher_options(placement: str | None, options: TeacherOptions, weights: object = None) -> None:
    """Raise TeacherError for an unknown placement, a value of the wrong type, and an option without effect."""
    _check_placement(placement, options.device_map)
    _check_inner(placement, options.inner)
    if options.servers is not None and "served" not in (placement, options.inner):
        raise _without_effect("servers", options.servers, placement, "placement='served'")
    if options.cache is not None:
        if placement != "cached":
            raise _without_effect("cache", options.cache, placement, "placement='cached'")
        _check_path("cache", options.cache, "a folder, for example cache='outputs'")
    _check_count("servers", options.servers)
    _check_count("top_k", options.top_k)
    temperature: object = options.temperature
    if not isinstance(temperature, Real) or not 0 < float(temperature) < math.inf:
        raise TeacherError(f"run.teacher got temperature={temperature!r}: pass a number above 0, for example 2.0")
    _check_dtype(options.dtype)
    if weights is not None:
        _check_path("weights", weights, "the path of a .safetensors file, a folder of shards, or a Hugging Face folder")


def shared_options(placement: str | None, options: TeacherOptions) -> dict[str, str]:
    """Return the options that must be the same on all ranks, as text.

    Not among them: `device_map`, because each rank may name its own devices, and `cache`, because rank 0 decides.

    >>> shared_options("cpu", TeacherOptions())["placement"]
    "'cpu'"
    """
    names = ("dtype", "top_k", "temperature", "servers", "inner")
    return {"placement": repr(placement or "auto"), **{name: repr(getattr(options, name)) for name in names}}


def _check_placement(placement: object, device_map: object) -> None:
    if isinstance(device_map, str):
        right = _closest_placement(device_map)
        hint = f"placement= is one of {_ALL_NAMES}" if right is None else f"use placement={right!r}"
        raise TeacherError(f"device_map={device_map!r} is a string: {hint}; {_DEVICE_MAP_USE}")
    for name, given, expected in (("placement", placement, str), ("device_map", device_map, Mapping)):
        if given is not None and not isinstance(given, expected):
            raise TeacherError(
                f"{name}= got a {type(given).__name__}: placement= takes one of {_ALL_NAMES}; {_DEVICE_MAP_USE}"
            )
    if isinstance(placement, str) and placement not in PLACEMENTS:
        right = _closest_placement(placement)
        hint = "" if right is None else f"use placement={right!r}; "
        raise TeacherError(f"placement={placement!r} does not exist: {hint}the placements are {_ALL_NAMES}")
    if device_map is not None and placement not in (None, "custom"):
        raise TeacherError(
            f"placement={placement!r} does not take a device_map: use placement='custom', or leave out placement="
        )


def _closest_placement(typed: str) -> str | None:
    """Return the placement that was probably meant: another spelling, another library's name, or a similar name."""
    name = typed.strip().lower().partition(":")[0].replace("-", "_")
    by_alias = {alias: placement for placement, aliases in _ALIASES.items() for alias in aliases}
    close = [name] if name in _NAMES else get_close_matches(name, _NAMES, n=1)
    return by_alias.get(name, close[0] if close else None)


def _check_inner(placement: str | None, inner: str | None) -> None:
    if inner is None:
        return
    if placement not in _INNER_CHOICES:
        raise _without_effect("inner", inner, placement, "placement='served' ('rank' or 'process') and 'cached'")
    if inner not in _INNER_CHOICES[placement]:
        choices = ", ".join(map(repr, _INNER_CHOICES[placement]))
        raise TeacherError(f"placement={placement!r} does not support inner={inner!r}: use one of {choices}")


def _without_effect(option: str, value: object, placement: str | None, right: str) -> TeacherError:
    here = "without placement=" if placement is None else f"with placement={placement!r}"
    shown = str(value) if isinstance(value, Path) else value
    return TeacherError(
        f"{option}={shown!r} has no effect {here}: it belongs to {right}; use that, or leave out {option}="
    )


def _check_count(name: str, count: object) -> None:
    if count is not None and (not isinstance(count, int) or count is True or count < 1):
        hint = "; to serve from a separate process pass inner='process'" if name == "servers" else ""
        raise TeacherError(f"{name}={count!r} is not a positive integer: pass 1 or more, or leave it out{hint}")


def _check_path(name: str, path: object, expected: str) -> None:
    if not isinstance(path, str | Path) or not str(path):
        problem = "is empty" if isinstance(path, str) else f"got a {type(path).__name__}"
        raise TeacherError(f"{name}= {problem}: pass {expected}")


def _check_dtype(dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
        name = _DTYPE_ALIASES.get(name, name)
        if not isinstance(getattr(torch, name, None), torch.dtype):
            name = "bfloat16"
        raise TeacherError(f"dtype={dtype!r} is not a torch dtype: pass dtype=torch.{name}")
    if not dtype.is_floating_point:
        raise TeacherError(
            f"dtype={dtype} is not a floating-point dtype: pass torch.bfloat16, torch.float16 or torch.float32"
        )
