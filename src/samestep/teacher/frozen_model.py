"""A frozen model before it has a place: its module without memory, its weights still in their files."""

import importlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from samestep.errors import TeacherError
from samestep.parallel.submodules import callable_by_itself, has_parameters, repeated_blocks
from samestep.teacher.weight_files import Weights


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers by name, in order: elements of the outermost lists of layers.

    A model without such a list has its direct children for blocks, and a single layer is a block by itself. No block
    lies inside another.
    """
    found = repeated_blocks(module, dicts=True)
    if not found:
        children = module.named_children()
        found = {name: child for name, child in children if callable_by_itself(child) and has_parameters(child)}
    return found or {"": module}


def called_by(module: nn.Module, own: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """For names in a file those of the module, which has these of its own; none where it is not of transformers."""
    body = getattr(module, "base_model_prefix", None)
    return called_in(own, body, names, _spelling(module)) if body and isinstance(body, str) else {}


def called_in(
    own: Collection[str], body: str, names: Sequence[str], spelt: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """For names in a file those of a model whose body is called `body`, where the two differ.

    The file may hold the body alone, without the name that it has in a model with a head, or be of a model with a head
    where the module is the body; old ones say gamma and beta; and `spelt` tells what has been renamed since.

    >>> called_in({"bert.norm.weight", "head.weight"}, "bert", ["norm.gamma", "head.weight"])
    {'norm.gamma': 'bert.norm.weight'}
    """
    taken, called = set(names), dict[str, str]()
    for stored in names:
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", spelt(stored)))
        found = next((each for each in (name, f"{body}.{name}", name.removeprefix(f"{body}.")) if each in own), stored)
        if stored not in own and found not in taken:
            called[stored] = found
            taken.add(found)
    return called


def _spelling(module: nn.Module) -> Callable[[str], str]:
    """What transformers, from 5 on, calls a tensor that it has saved under the name of an earlier version.

    These are no public names of transformers: without them only what is said above is understood.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        changes = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
        renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    except (ImportError, AttributeError, TypeError):  # an earlier version, or no model of transformers after all
        return lambda name: name
    return lambda name: loading.rename_source_key(name, renamings, [])[0]


_PLACES: Final = 16
_RUN: Final = 64  # elements at each of them


def sample(tensor: torch.Tensor) -> bytes:
    """The bytes of a thousand elements, spread over the tensor: reading a large teacher in full takes minutes."""
    flat = tensor.detach().cpu().reshape(-1)
    if not flat.numel():
        return b""
    raw, size = flat.view(torch.uint8).numpy(), flat.element_size()  # numpy cuts several times as quickly as torch
    if flat.numel() <= _PLACES * _RUN:
        return raw.tobytes()
    last = flat.numel() - _RUN
    starts = (last * at // (_PLACES - 1) for at in range(_PLACES))
    return b"".join(raw[start * size : (start + _RUN) * size].tobytes() for start in starts)


Build = Callable[[], nn.Module | tuple[nn.Module, object] | tuple[nn.Module, object, object]]
Unused = Callable[[list[str], Collection[str]], Collection[str]]
"""Of tensors in the files that are none of a module's own, which it does without; its own names are the second."""
SHOWN: Final = 5
"""How many names a message shows."""
_DRAWS: Final = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
# Where torch has the hooks of its old ways to normalise a weight, by their module: they may go in a later version.
_NORMS: Final = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_MISSING: Final = "name(s) of the module are not in the file"
_EXTRA: Final = "name(s) of the file are not in the module"
_JOINED: Final = (
    "; where transformers joins weights as it loads them, as those of experts, write them joined, once: "
    "torch.save(model.state_dict(), 'teacher.pt') after from_pretrained, and give weights='teacher.pt' too"
)
# What stands before the names of a state that was taken from around a model.
_AROUND: Final = {
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "module._orig_mod.": "DistributedDataParallel around torch.compile",
    "_orig_mod.module.": "torch.compile around DistributedDataParallel",
}


class FrozenModel:
    """What `build` makes, checked against the weights: any number of modules can be filled from it, or pieces of one.

    Parameters never take memory before they have a place. Buffers that are not saved (rotary frequencies, masks) are
    computed by `build` on the CPU, each time, in the dtype that it gives them.
    """

    def __init__(self, build: Build, weights: Weights, unused: Unused = lambda others, own: ()) -> None:
        self.build = build
        module, self.example = _skeleton(build)
        """An example batch, if `build` returns one with the module; else None."""
        own = {name for name, _ in (*_saved(module), *computed(module))}
        self.weights = weights.renamed(called_by(module, own, weights.names()))
        """What the files hold, by the module's names where transformers has saved it under others."""
        self._spare: nn.Module | None = module
        self._source, self.unused = _check(module, self.weights, unused)
        """Names of the files that the module does without."""
        self.bytes = sum(self.weights.bytes_of(name) for name in set(self._source.values()))
        """Bytes of the weights as the files hold them."""

    def skeleton(self) -> nn.Module:
        """A new module in evaluation mode, with parameters on the meta device and real buffers."""
        module, self._spare = self._spare, None
        return _skeleton(self.build)[0] if module is None else module

    def take_back(self, module: nn.Module) -> None:
        """Keep a skeleton that was not filled, for whoever asks next."""
        self._spare = module

    def names(self) -> list[str]:
        """The tensors of the files that the module needs: what is tied has one."""
        return list(dict.fromkeys(self._source.values()))

    def saved(self) -> list[str]:
        """Every parameter and saved buffer of the module, tied ones under each of their names."""
        return list(self._source)

    def source(self, name: str) -> str:
        """The tensor of the files that belongs to a parameter or buffer; another name where weights are tied."""
        return self._source[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the CPU: a view of the file where the dtype is the file's, or else a new one."""
        found = self.weights.tensor(self._source[name])
        return found.to(target_dtype(found.dtype, dtype))

    def dtype(self, name: str, wish: torch.dtype | None = None) -> torch.dtype:
        """What a tensor has become where `wish` was asked for."""
        return target_dtype(self.weights.dtype(self._source[name]), wish)

    def bytes_in(self, wish: torch.dtype | None) -> int:
        """Bytes of the weights where `wish` was asked for."""
        return sum(self.bytes_of(name, wish) for name in self.names())

    def bytes_of(self, name: str, wish: torch.dtype | None = None) -> int:
        """Bytes of one tensor where `wish` was asked for."""
        return torch.Size(self.weights.shape(self._source[name])).numel() * self.dtype(name, wish).itemsize

    def converts(self, wish: torch.dtype | None) -> bool:
        """Whether any tensor must change to be what was asked for."""
        return any(self.dtype(name, wish) != self.weights.dtype(name) for name in self.names())

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """A module with a copy of its own of all weights on `device`, tensor by tensor."""
        module = self.skeleton()

        def copy(name: str) -> torch.Tensor:
            """One tensor there, never a view of the file."""
            there = self.weights.tensor(name)
            return there.to(device, target_dtype(there.dtype, dtype), copy=True)

        self.fill(module, copy)
        settle(module, lambda name: device)
        return module

    def fill(
        self,
        module: nn.Module,
        get: Callable[[str], torch.Tensor],
        which: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Give what `get` gives for their names in the files to the parameters and saved buffers that `which` picks.

        Tied ones get one tensor.
        """
        made: dict[str, nn.Parameter | torch.Tensor] = {}
        for name, tensor in list(_saved(module)):
            if not which(name):
                continue
            source = self._source[name]
            if source not in made:
                value = get(source)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[source] = nn.Parameter(value, requires_grad=False) if is_parameter else value
            put(module, name, made[source])


def target_dtype(has: torch.dtype, wish: torch.dtype | None) -> torch.dtype:
    """What a tensor becomes where `wish` was asked for: whole numbers stay what they are."""
    return wish if wish is not None and has.is_floating_point else has


def inside(name: str, module: str) -> bool:
    """Whether a tensor or module of this name lies in a module."""
    return not module or name == module or name.startswith(f"{module}.")


def settle(module: nn.Module, device_of: Callable[[str], torch.device]) -> None:
    """Move the buffers that no file holds to the device of their name."""
    for name, buffer in list(computed(module)):
        put(module, name, buffer.to(device_of(name)))


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer, by its full name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)


class _LeaveEmpty(TorchFunctionMode):
    """Passes over the drawing of initial values where there is no memory for them, which is slow even so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        filled = args[0] if args else given.get("tensor")
        draws = getattr(func, "__name__", "") in _DRAWS or getattr(func, "__module__", "") == nn.init.__name__
        return filled if draws and isinstance(filled, torch.Tensor) and filled.is_meta else func(*args, **given)


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes, which torch neither saves nor moves.

    Not those that weight_norm and spectral_norm compute anew before each call.
    """
    for path, part in module.named_modules():
        hooks: list[Any] = list(part._forward_pre_hooks.values())  # pyright: ignore[reportPrivateUsage]
        anew = {hook.name for hook in hooks if type(hook).__module__ in _NORMS}
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and name not in anew:
                yield f"{path}.{name}" if path else name, value


def _skeleton(build: Build) -> tuple[nn.Module, object]:
    """What `build` makes, with parameters that are moved to the meta device in the moment they are made; its example.

    A module built on the meta device as a whole would have no values in the buffers that no file holds, nor in tensors
    that are plain attributes. Where a parameter is made with torch.empty, as torch's modules do, no page of it is ever
    touched.
    """

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """What a module keeps instead of a parameter that it is given."""
        if parameter.is_meta:
            return None  # ties depend on it staying the same object
        if is_lazy(parameter):
            raise TeacherError(
                f"build() makes a {type(module).__name__}, whose {name!r} has no shape before the first call: give it "
                "its size, as in nn.Linear(8, 16) for nn.LazyLinear(16)"
            )
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)  # pyright: ignore[reportArgumentType]  # the stub asks for more than is needed
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _LeaveEmpty():  # the run's own luck stays as it was
            torch.manual_seed(0)
            made = build()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise TeacherError(
            f"build() looks at the values of parameters, which have none yet ({str(error).splitlines()[0]}): let it "
            "make the module only; its weights come from weights="
        ) from error
    finally:
        hook.remove()
    given: tuple[Any, ...] = (*made, None) if isinstance(made, tuple) else (made, None)
    module, example = given[:2]  # a loss behind them is for `samestep plan`
    _refuse_unusable(module)
    return module.eval().requires_grad_(False), example


def _refuse_unusable(module: nn.Module) -> None:
    """Raise where what `build` made is no module, or has parameters with memory, or other tensors without values."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # it is the user's function
        raise TeacherError(
            f"build() gave a {type(module).__name__} and no torch.nn.Module: return the teacher's module"
        )
    for name, tensor in list(_saved(module)):
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise TeacherError(
                f"build() left {name!r} on {tensor.device}: a teacher's weights come from weights=; let build() make "
                "the module only, without loading or moving it"
            )
    for name, tensor in (*computed(module), *_attributes(module)):
        if tensor.is_meta:
            raise TeacherError(
                f"build() made {name!r} on the meta device and no file holds it: build the module on the CPU, where "
                "its parameters take no memory either, or register it as a buffer with persistent=True and save it"
            )


def _check(module: nn.Module, weights: Weights, unused: Unused) -> tuple[dict[str, str], list[str]]:
    """For each parameter and saved buffer its name in the files, and what is left; raise where there are two models."""
    held = set(weights.names())
    tied: dict[int, list[str]] = {}
    for name, tensor in _saved(module):
        tied.setdefault(id(tensor), []).append(name)
    source: dict[str, str] = {}
    missing: list[str] = []
    for names in tied.values():
        there = [name for name in names if name in held]
        if not there:
            missing.append(names[0])
            continue
        _refuse_untied(weights, there)
        source.update(dict.fromkeys(names, there[0]))
    known = {*source, *missing, *(name for name, _ in computed(module))}
    left = [name for name in weights.names() if name not in known]
    spare = set(unused(left, known))
    _refuse_names(module, weights, missing, [name for name in left if name not in spare])
    _refuse_shapes(module, weights, source)
    return source, left


def _refuse_untied(weights: Weights, names: list[str]) -> None:
    """Raise where the module has one tensor under several names and the file holds different ones."""
    for name in names[1:]:
        first, other = weights.tensor(names[0]), weights.tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype or sample(other) != sample(first):
            raise TeacherError(
                f"build() ties {names[0]!r} and {name!r} to one tensor and {weights.path} holds two different ones: "
                "let build() make the module untied"
            )


def _refuse_names(module: nn.Module, weights: Weights, missing: list[str], extra: list[str]) -> None:
    if (remedy := _otherwise_named(type(module).__name__, weights.path, missing, extra)) is not None:
        raise TeacherError(remedy)
    told = [
        f"{len(names)} {what}, e.g. {names[:SHOWN]}" for names, what in ((missing, _MISSING), (extra, _EXTRA)) if names
    ]
    if told:
        raise TeacherError(
            f"{type(module).__name__} and {weights.path} are not of one model: {'; '.join(told)}; let build() make the "
            f"module whose state was saved{_JOINED if hasattr(module, 'base_model_prefix') else ''}"
        )


def _otherwise_named(module: str, path: Path, missing: list[str], extra: list[str]) -> str | None:
    """What to say where the weights are those of the module, under names that something around them has made."""
    if prefix := _prefix(missing, extra):
        around = _AROUND.get(prefix)
        return (
            f"{path} holds the weights of {module} under names that begin with {prefix!r}"
            f"{f', as {around} leaves them' if around else ''}: save model.{prefix[:-1]}.state_dict(), or take it off "
            f"once, {{name.removeprefix({prefix!r}): tensor for name, tensor in state.items() if "
            f"name.startswith({prefix!r})}}, and save that"
        )
    if prefix := _prefix(extra, missing):
        return (
            f"{path} holds the weights of a part of {module}, whose names begin with {prefix!r} there: let build() "
            f"return that part, .{prefix[:-1]}"
        )
    return None


def _prefix(names: list[str], others: list[str]) -> str | None:
    """What stands before each of `names` among the others; None where some are not there so."""
    longer = next((other for other in others if names and other.endswith(f".{names[0]}")), None)
    if longer is None:
        return None
    prefix = longer.removesuffix(names[0])
    return prefix if {f"{prefix}{name}" for name in names} <= set(others) else None


def _refuse_shapes(module: nn.Module, weights: Weights, source: dict[str, str]) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in _saved(module)}
    wrong = [name for name, has in source.items() if here[name] != weights.shape(has)]
    if wrong:
        told = [f"{name} is {here[name]} and there {weights.shape(source[name])}" for name in wrong[:SHOWN]]
        raise TeacherError(
            f"{len(wrong)} tensor(s) of {type(module).__name__} have another shape in {weights.path}: "
            f"{'; '.join(told)}; build the module with the settings that its weights were trained with"
        )


def _saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a file holds, tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    unsaved = {name for name, _ in computed(module)}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in unsaved:
            yield name, buffer


def computed(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are not saved."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name in sorted(part._non_persistent_buffers_set):  # pyright: ignore[reportPrivateUsage]
            if (buffer := part._buffers.get(name)) is not None:  # pyright: ignore[reportPrivateUsage]
                yield f"{path}.{name}" if path else name, buffer
