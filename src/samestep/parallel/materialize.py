"""Weights of a model that is wrapped, block by block: from rank 0, from files, or as its modules initialize them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import run_on_every_rank
from samestep.errors import WrapError
from samestep.messages import format_list
from samestep.torch_private import is_dtensor

Read = Callable[[str], torch.Tensor]
"""A tensor of the weight files by its name in the model, as a view of the file."""
_RESETS: Final = ("reset_parameters", "_reset_parameters", "init_weights")  # the first one that takes no argument
_HOOK: Final = "_init_weights"  # takes a module; transformers, timm and nanoGPT apply it to all modules of a model
_SHOWN: Final = 6
_CHECKSUM_BYTES: Final = 6  # exact in a float64


class ModelWeights:
    """Gives the tensors of a model their values and their device, one part of the model at a time, on all ranks.

    The values are those of rank 0. What rank 0 has on the meta device comes from `read` or, without it, from the
    methods that initialize its modules. So no rank holds more of a model on the meta device than it asks for.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        device: torch.device,
        frozen: Mapping[str, nn.Module],
        blocks: Sequence[nn.Module],
        read: Read | None,
    ) -> None:
        """Compare the models of the ranks; a collective. `frozen` and `blocks` are parts of the model."""
        self.read = read
        self._comm, self._model, self._device = comm, model, device
        self._frozen = {id(module) for part in frozen.values() for module in part.modules()}
        self._placed: dict[int, torch.Tensor] = {}  # what stays in full
        if read is not None:
            _discard(model)
        self._meta = _MetaTensors(model)
        compare_models(comm, model)
        own_frozen = any(t.is_meta for part in frozen.values() for t in (*part.parameters(), *part.buffers()))
        found = [part.tolist() for part in comm.exchange("comparing models", [bool(self._meta), own_frozen])]
        self.on_meta = bool(found[0][0])
        """Whether rank 0 has tensors on the meta device."""
        self._compare_frozen = not any(part[1] for part in found)
        self._resets: _Resets | None = None
        if self.on_meta:
            self._resets = self._prepare_resets(blocks)

    def place(self, name: str, part: nn.Module, parameters: bool = True) -> None:
        """Move the submodule `part` of this name to the device, with rank 0's values; a collective.

        Frozen parts are usually loaded from files on every rank, so they are broadcast only if a rank lacks values.
        Without `parameters` only buffers get rank 0's values.
        """
        what = f"placing {name or 'the model'} on the device"
        sent = run_on_every_rank(self._comm, what, WrapError, self._place_part, name, part, parameters)
        if not self._comm.alone:
            broadcast(self._comm, sent)

    def _place_part(self, name: str, part: nn.Module, parameters: bool) -> list[torch.Tensor]:
        """Do what `place` does on this rank alone; returns the tensors that get rank 0's values."""
        self._initialize(name)
        sent: list[torch.Tensor] = []
        for module in part.modules():
            for leaf, tensor in list(own_tensors(module)):
                if is_dtensor(tensor) or id(tensor) in self._placed:
                    continue
                placed = self._place(module, leaf, tensor)
                if id(module) in self._frozen or not isinstance(placed, nn.Parameter):
                    self._placed[id(placed)] = placed
                skipped = self._compare_frozen and id(module) in self._frozen
                if not skipped and (parameters or not isinstance(placed, nn.Parameter)):
                    sent.append(placed)
        return list({id(tensor): tensor for tensor in sent}.values())

    def place_all(self) -> None:
        """Move the full model to the device, with rank 0's values; a collective."""
        run_on_every_rank(self._comm, "placing the model on the device", WrapError, self._fill_all)
        self.place("", self._model)
        if self._meta:  # everything is on the device, but modules may have a conversion of their own
            self._model.to(self._device)

    def _fill_all(self) -> None:
        """Give the model the values that rank 0 reads or computes; move a model with values to the device."""
        if self.read is not None and self._comm.world.is_main:
            with_nan = list[str]()
            for name, tensor in saved_tensors(self._model):
                if tensor.is_meta:
                    value = self.read(name).to(self._device, tensor.dtype, copy=True)
                    with_nan += [name] if _has_nan(value) else []
                    self._meta.fill(tensor, value)
            _refuse_nan(with_nan)
        self._initialize("")
        if not self._meta:
            self._model.to(self._device)

    def load_shards(self, cpu_offload: bool) -> None:
        """Read this rank's part of every tensor of a model that was sharded on the meta device; a collective."""
        what = "reading this rank's part of the weights"
        run_on_every_rank(self._comm, what, WrapError, self._read_parts, cpu_offload)
        self.place("", self._model, parameters=False)

    def _read_parts(self, cpu_offload: bool) -> None:
        assert self.read is not None
        self._initialize("")
        positions: dict[int, list[tuple[nn.Module, str]]] = {}
        kept: dict[int, torch.Tensor] = {}
        for module in self._model.modules():
            for leaf, tensor in own_tensors(module):
                positions.setdefault(id(tensor), []).append((module, leaf))
                if not tensor.is_meta:
                    kept[id(tensor)] = tensor
        self._model.to_empty(device=torch.device("cpu") if cpu_offload else self._device)
        for key, (first, *others) in positions.items():
            tensor = kept.get(key, getattr(*first))
            for module, leaf in (first, *others) if key in kept else others:  # tied weights are tied again
                setattr(module, leaf, tensor)
        with_nan = list[str]()
        with torch.no_grad():
            for name, tensor in saved_tensors(self._model, remove_duplicate=True):
                if is_dtensor(tensor):
                    copy_part(tensor, self.read(name))
                else:
                    tensor.copy_(self.read(name))
                with_nan += [name] if _has_nan(tensor.to_local() if is_dtensor(tensor) else tensor) else []
        _refuse_nan(with_nan)

    def _initialize(self, part: str) -> None:
        """On rank 0: let the modules of a model on the meta device initialize themselves as far as `part` needs it."""
        if self._resets is not None:
            self._resets.run_until(part)

    def _prepare_resets(self, blocks: Sequence[nn.Module]) -> "_Resets | None":
        """What rank 0 calls to initialize its model; an error on all ranks if a module has no such method."""
        resets, problem = None, None
        if self._comm.world.is_main:
            saved = {id(tensor) for _, tensor in saved_tensors(self._model)} if self.read is not None else set[int]()
            resets = _Resets(self._model, self._meta, blocks, saved)
            problem = resets.problem()
        if problem := self._comm.exchange_objects("preparing the initialization of the model", problem)[0]:
            raise WrapError(problem)
        return resets

    def _place(self, module: nn.Module, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return self._meta.fill(tensor, torch.empty_like(tensor, device=self._device))
        if tensor.device != self._device:
            tensor.data = tensor.data.to(self._device)
        return tensor


class _MetaTensors:
    """The tensors of a model on the meta device, and all places where each is: tied weights stay tied."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
        for module in model.modules():
            for leaf, tensor in own_tensors(module):
                if tensor.is_meta:
                    self._places.setdefault(id(tensor), (tensor, []))[1].append((module, leaf))

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._places

    def fill(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Put a tensor with memory in all places of one without; returns it."""
        filled = _like(tensor, value)
        for module, leaf in self._places[id(tensor)][1]:
            setattr(module, leaf, filled)
        return filled


class _Resets:
    """Initializes the modules of rank 0 on the CPU, children before parents, as their constructors do.

    With the same state of torch's generator, the values are those of the same model built on the CPU if each module
    initializes itself with its reset method. A tied weight has the values of the first module that holds it.
    """

    def __init__(self, model: nn.Module, meta: _MetaTensors, blocks: Sequence[nn.Module], saved: set[int]) -> None:
        self._meta, self._saved, self._next = meta, saved, 0
        inside = {id(module) for block in blocks for module in block.modules()}
        self._steps: list[tuple[str, nn.Module, list[Callable[[], object]], bool]] = []
        self._without: list[str] = []  # modules that nothing initializes
        self._has_parametrization = False  # among these
        for name, module, hook in _children_first(model):
            own = [tensor for _, tensor in own_tensors(module)]
            missing = any(tensor in meta and id(tensor) not in saved for tensor in own)
            # a method of an outer module may initialize what is inside of it, but only if nothing there has values
            outer = not own and not saved and _all_in(module, meta)
            calls = _reset_methods(module) if missing or outer else []
            reaches = bool(calls) and not saved
            if hook is not None and (missing or (outer and id(module) in inside)):
                calls.append(partial(hook, module))
            if calls:
                self._steps.append((name, module, calls, reaches))
            elif missing:
                unset = [leaf for leaf, each in own_tensors(module) if each in meta and id(each) not in saved]
                names = [f"{name}.{leaf}" if name else leaf for leaf in unset]
                self._without.append(f"{type(module).__name__} ({format_list(names, _SHOWN)})")
                self._has_parametrization |= isinstance(module, ParametrizationList)

    def problem(self) -> str | None:
        """Why the model cannot be initialized, or None."""
        if not self._without:
            return None
        shown = format_list(self._without, _SHOWN)
        text = (
            f"the model is on the meta device, and {len(self._without)} module(s) cannot compute their values: {shown}"
        )
        if self._has_parametrization and not self._saved:
            return (
                f"{text}. A parametrization, such as weight_norm, has no method that initializes it: pass weights= a "
                "file or folder that holds these tensors, or build the model on the CPU of rank 0"
            )
        if self._saved:
            return (
                f"{text}, and weights= does not give them, since they are not in a state dict (persistent=False). Give "
                "each class a method reset_parameters() that sets them, or build the model on the CPU, where weights= "
                "replaces only what the file holds"
            )
        return (
            f"{text}. Give each class a method reset_parameters() that sets its own parameters and buffers, pass "
            "weights= a file or folder that holds them, or build the model on the CPU of rank 0"
        )

    def run_until(self, part: str) -> None:
        """Initialize all modules up to the last that is in `part`, or whose methods may change it."""
        needed = [
            index
            for index, (name, _, _, reaches) in enumerate(self._steps)
            if is_inside(name, part) or (reaches and is_inside(part, name))
        ]
        while self._next <= max(needed, default=-1):
            self._reset(*self._steps[self._next][:3])
            self._next += 1

    def _reset(self, name: str, module: nn.Module, calls: Sequence[Callable[[], object]]) -> None:
        """Let the module initialize new tensors, so that it changes none of those that already have values."""
        own = list(own_tensors(module))
        for leaf, tensor in own:
            setattr(module, leaf, _like(tensor, _unset(tensor) if tensor.is_meta else tensor.detach().clone()))
        with torch.no_grad():
            for call in calls:
                try:
                    call()
                except Exception as error:
                    raise WrapError(
                        f"the model is on the meta device, and {_describe(name, module)} cannot initialize itself: "
                        f"{getattr(call, '__name__', _HOOK)}() raised {type(error).__name__}: {error}. Repair this "
                        "method, or build the model on the CPU of rank 0"
                    ) from error
        for leaf, tensor in own:
            value = getattr(module, leaf)
            setattr(module, leaf, tensor)
            if not tensor.is_meta or id(tensor) in self._saved:
                continue
            if _is_unset(value):
                raise WrapError(
                    f"the model is on the meta device, and {_describe(name, module)} does not initialize {leaf!r}: let "
                    "its reset_parameters() set all of its parameters and buffers (torch's weight_norm has none that "
                    "does), pass weights= a file or folder that holds them, or build the model on the CPU of rank 0"
                )
            self._meta.fill(tensor, value.detach())


def compare_models(comm: Communicator, model: nn.Module) -> None:
    """Raise if the ranks built different models; a collective.

    Ranks exchange a checksum. Only if these differ, they search for the first difference, with a checksum per exchange.
    """
    if comm.alone:
        return
    named = (*model.named_parameters(), *model.named_buffers())
    entries = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    low, high = 0, _longest_if_different(comm, entries)
    if not high:
        return
    while high - low > 1:  # the first `low` entries are equal on all ranks, the first `high` are not
        middle = (low + high) // 2
        low, high = (low, middle) if _longest_if_different(comm, entries[:middle]) else (middle, high)
    by_rank = comm.exchange_objects("comparing models", entries[low] if low < len(entries) else "nothing")
    mine = by_rank[comm.world.rank]
    rank = next(rank for rank, theirs in enumerate(by_rank) if theirs != mine)
    raise WrapError(
        f"rank {comm.world.rank} and rank {rank} built different models: {mine} here, {by_rank[rank]} there; build the "
        "model from the same configuration on every rank"
    )


def broadcast(comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Replace the values of all ranks by those of rank 0."""
    with torch.no_grad(), comm.collective("broadcasting the weights of rank 0"):
        for tensor in tensors:
            if tensor.is_contiguous():
                dist.broadcast(tensor, src=0, group=comm.group)
                continue
            # an expanded or sliced tensor is not contiguous, and torch would broadcast it as if it were
            dense = tensor.detach().clone()
            if dense.stride() == tensor.stride():
                dist.broadcast(tensor, src=0, group=comm.group)
            else:
                dist.broadcast(dense, src=0, group=comm.group)
                tensor.set_(dense)  # pyright: ignore[reportArgumentType]  # the stubs lack this overload


def copy_part(parameter: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's part of a full tensor; of a mapped file, only the pages of that part are read."""
    if is_dtensor(parameter):
        mesh, position = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        assert position is not None, "every rank is in the mesh"
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():  # along the first dimension, as FSDP shards
                parts = source.chunk(mesh.size(dimension), dim=0)
                source = parts[position[dimension]] if position[dimension] < len(parts) else source[:0]
        parameter = parameter.to_local()
    with torch.no_grad():
        parameter.copy_(source)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module itself, not of its submodules, by name."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def saved_tensors(module: nn.Module, remove_duplicate: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that are in a state dict, by full name; tied ones under each name unless removed."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    for path, part in module.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=remove_duplicate):
            if name not in part._non_persistent_buffers_set:  # pyright: ignore[reportPrivateUsage]
                yield f"{path}.{name}" if path else name, buffer


def is_inside(name: str, module: str) -> bool:
    """Whether a tensor or module of this name belongs to the submodule named `module`."""
    return not module or name == module or name.startswith(f"{module}.")


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, each after its submodules."""
    return (each for _, each, _ in _children_first(module))


Hook = Callable[[nn.Module], object]


def _children_first(
    module: nn.Module, name: str = "", hook: Hook | None = None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, Hook | None]]:
    """Modules with their names, each after its submodules, and the nearest hook that initializes any module."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    own = getattr(module, _HOOK, None)
    hook = own if callable(own) and _accepts(own, module) else hook
    for leaf, child in module.named_children():
        yield from _children_first(child, f"{name}.{leaf}" if name else leaf, hook, seen)
    yield name, module, hook


def _reset_methods(module: nn.Module) -> list[Callable[[], object]]:
    names = [name for name in _RESETS if name != "init_weights" or not hasattr(module, _HOOK)]
    methods = [getattr(module, name, None) for name in names]
    usable = [method for method in methods if callable(method) and _accepts(method)][:1]
    buffers = getattr(module, "reset_buffers", None)
    return [*usable, buffers] if callable(buffers) and _accepts(buffers) else usable


def _accepts(method: Callable[..., object], *arguments: object) -> bool:
    """Whether a method can be called with these arguments only."""
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _all_in(module: nn.Module, meta: _MetaTensors) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    return bool(tensors) and all(tensor in meta for tensor in tensors)


def _discard(model: nn.Module) -> None:
    """Replace parameters and saved buffers by tensors without memory; tied ones stay tied."""
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, tensor in list(saved_tensors(model)):
        if tensor.is_meta:
            continue
        _, meta = replaced.setdefault(id(tensor), (tensor, _like(tensor, torch.empty_like(tensor, device="meta"))))
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, meta)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a parameter with the attributes of `tensor`, if that is one."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value.detach(), requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _describe(name: str, module: nn.Module) -> str:
    """A module for a message: its class and its path in the model.

    >>> _describe("blocks.0", nn.Linear(1, 1)), _describe("", nn.Linear(1, 1))
    ("Linear at 'blocks.0'", 'Linear, the model itself,')
    """
    return f"{type(module).__name__} at {name!r}" if name else f"{type(module).__name__}, the model itself,"


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether a value is nan; the sum, which needs no memory, says no for almost every tensor without one."""
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    if exact or tensor.dtype.itemsize == 1:  # torch computes no sum of fp8
        return False
    return bool(tensor.detach().sum().isnan()) and bool(tensor.isnan().any())


def _refuse_nan(names: Sequence[str]) -> None:
    if names:
        raise WrapError(
            f"weights= of run.wrap: {len(names)} tensor(s) in the file hold nan: {format_list(list(names), _SHOWN)}. "
            "Pass the weights of an earlier checkpoint of that training, from before its loss became nan"
        )


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with values by which `_is_unset` recognizes it."""
    empty = torch.empty_like(tensor, device="cpu")
    if tensor.dtype == torch.bool:
        return empty.fill_(False)
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    return empty.fill_(torch.iinfo(tensor.dtype).min if exact else torch.nan)


def _is_unset(value: torch.Tensor) -> bool:
    if value.dtype == torch.bool or not value.numel():
        return False
    exact = not (value.is_floating_point() or value.is_complex())
    # a part that was not written counts too, except for whole numbers, whose smallest value may be a real one
    return bool((value == torch.iinfo(value.dtype).min).all() if exact else value.isnan().any())


def _longest_if_different(comm: Communicator, entries: Sequence[object]) -> int:
    """The largest number of entries on any rank, or 0 if they are the same on all ranks; a collective."""
    checksum = int.from_bytes(sha256(repr(entries).encode()).digest()[:_CHECKSUM_BYTES], "little")
    found = {tuple(part.tolist()) for part in comm.exchange("comparing models", [float(checksum), float(len(entries))])}
    return int(max(count for _, count in found)) if len(found) > 1 else 0
