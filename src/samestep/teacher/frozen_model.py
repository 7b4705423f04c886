"""A frozen model before it is placed: its module without memory for parameters, its weights still in their files."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.parallel.materialize import is_inside, saved_tensors
from samestep.parallel.submodules import callable_by_itself, has_parameters, repeated_blocks
from samestep.teacher.model_files import FolderBuilder, UnusedNames, Weights, module_names

Build = Callable[[], nn.Module | tuple[nn.Module, object] | tuple[nn.Module, object, object]]
"""Builds the module; may also return an example batch, and a loss that only `samestep plan` uses."""
SHOWN: Final = 5  # names in a message
_RANDOM_INITS: Final = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
)
# The modules of torch's old weight normalization hooks; a later version may remove them.
_NORM_HOOKS: Final = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")
_MERGED: Final = (
    "; if transformers merges weights when it loads them, as it does for experts, save them merged, once: "
    "torch.save(model.state_dict(), 'teacher.pt') after from_pretrained, and also pass weights='teacher.pt'"
)
# Prefixes in the state dict of a wrapped model.
_WRAPPER_PREFIXES: Final = {
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "module._orig_mod.": "DistributedDataParallel around torch.compile",
    "_orig_mod.module.": "torch.compile around DistributedDataParallel",
}
_SAMPLE_RUNS: Final = 16
_SAMPLE_LENGTH: Final = 64  # elements per run


class FrozenModel:
    """The module that `build` makes, checked against the weights; modules or parts of one can be filled from it.

    Parameters take no memory before they are placed. `build` computes buffers that are not saved (rotary frequencies,
    masks) on the CPU, each time, in its own dtype.
    """

    def __init__(self, build: Build, weights: Weights, unused: UnusedNames = lambda others, own: ()) -> None:
        self.build = build
        module, self.example = _build_skeleton(build)  # the example batch is None if `build` returns none
        own = {name for name, _ in (*saved_tensors(module), *unsaved_buffers(module))}
        # With the module's names if transformers saved the tensors under other names.
        self.weights = weights.renamed(module_names(module, own, weights.names()))
        self._skeleton: nn.Module | None = module
        self._stored_name, self.unused = _match_weights(module, self.weights, unused)  # unused: only in the files

    def skeleton(self) -> nn.Module:
        """Return a new module in evaluation mode, with parameters on the meta device and real buffers."""
        module, self._skeleton = self._skeleton, None
        return _build_skeleton(self.build)[0] if module is None else module

    def return_skeleton(self, module: nn.Module) -> None:
        """Keep a skeleton that was not filled, for the next caller of `skeleton`."""
        self._skeleton = module

    def stored_names(self) -> list[str]:
        """Return the names of the tensors in the files that the module needs; tied weights have one name."""
        return list(dict.fromkeys(self._stored_name.values()))

    def saved_names(self) -> list[str]:
        """Return the name of every parameter and saved buffer of the module; tied ones have several."""
        return list(self._stored_name)

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a parameter or buffer; the two differ for tied weights."""
        return self._stored_name[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on the CPU: a view of the file if it has the right dtype, else a new tensor."""
        return self.weights.tensor(self._stored_name[name]).to(self.dtype(name, dtype))

    def copy_tensor(self, name: str, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a copy of a tensor on `device`, never a view of the file."""
        return self.weights.tensor(name).to(device, self.dtype(name, dtype), copy=True)

    def dtype(self, name: str, dtype: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of a tensor after conversion to `dtype`, which only changes floating-point tensors."""
        stored = self.weights.dtype(self._stored_name[name])
        return dtype if dtype is not None and stored.is_floating_point else stored

    def bytes_of(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one tensor after conversion to `dtype`."""
        return torch.Size(self.weights.shape(self._stored_name[name])).numel() * self.dtype(name, dtype).itemsize

    def total_bytes(self, dtype: torch.dtype | None = None, part: str = "") -> int:
        """Return the bytes of all weights, or of those in the submodule `part`, after conversion to `dtype`."""
        return sum(self.bytes_of(name, dtype) for name in self.stored_names() if is_inside(name, part))

    def needs_conversion(self, dtype: torch.dtype | None) -> bool:
        """Whether any tensor has another dtype in the files than after conversion to `dtype`."""
        return any(self.dtype(name, dtype) != self.weights.dtype(name) for name in self.stored_names())

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a module with its own copy of all weights on `device`, loaded tensor by tensor."""
        module = self.skeleton()
        self.fill(module, lambda name: self.copy_tensor(name, device, dtype))
        move_unsaved_buffers(module, lambda name: device)
        return module

    def fill(
        self, module: nn.Module, get: Callable[[str], torch.Tensor], select: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Set the parameters and saved buffers that `select` picks to `get(name in the files)`.

        Tied ones get the same tensor.
        """
        values: dict[str, nn.Parameter | torch.Tensor] = {}
        for name, tensor in list(saved_tensors(module)):
            if not select(name):
                continue
            stored = self._stored_name[name]
            if stored not in values:
                value = get(stored)
                is_parameter = isinstance(tensor, nn.Parameter)
                values[stored] = nn.Parameter(value, requires_grad=False) if is_parameter else value
            set_tensor(module, name, values[stored])


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated layers by name, in order: the elements of the outermost lists of layers.

    If a model has no such list, its direct children are the blocks; a single layer is one block. Blocks are never
    nested.
    """
    found = repeated_blocks(module, dicts=True)
    if not found:
        children = module.named_children()
        found = {name: child for name, child in children if callable_by_itself(child) and has_parameters(child)}
    return found or {"": module}


def set_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter or buffer, by its full name."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)


def unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are not in a state dict (persistent=False)."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name in sorted(part._non_persistent_buffers_set):  # pyright: ignore[reportPrivateUsage]
            if (buffer := part._buffers.get(name)) is not None:  # pyright: ignore[reportPrivateUsage]
                yield f"{path}.{name}" if path else name, buffer


def move_unsaved_buffers(module: nn.Module, device_of: Callable[[str], torch.device]) -> None:
    """Move the buffers that are not in the files to the device of their name."""
    for name, buffer in list(unsaved_buffers(module)):
        set_tensor(module, name, buffer.to(device_of(name)))


def sample_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of about a thousand elements from all over the tensor; reading all of it could take minutes."""
    flat = tensor.detach().cpu().reshape(-1)
    if not flat.numel():
        return b""
    raw, size = flat.view(torch.uint8).numpy(), flat.element_size()  # numpy slices several times as fast as torch
    if flat.numel() <= _SAMPLE_RUNS * _SAMPLE_LENGTH:
        return raw.tobytes()
    last = flat.numel() - _SAMPLE_LENGTH
    starts = (last * run // (_SAMPLE_RUNS - 1) for run in range(_SAMPLE_RUNS))
    return b"".join(raw[start * size : (start + _SAMPLE_LENGTH) * size].tobytes() for start in starts)


class _SkipInitialization(TorchFunctionMode):
    """Skips random initialization of meta tensors, which is slow although it has no effect."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        is_init = getattr(func, "__name__", "") in _RANDOM_INITS or getattr(func, "__module__", "") == nn.init.__name__
        return target if is_init and isinstance(target, torch.Tensor) and target.is_meta else func(*args, **kwargs)


def _build_skeleton(build: Build) -> tuple[nn.Module, object]:
    """Build the module with each parameter moved to the meta device when it is registered; return it and its example.

    A module built entirely on the meta device would have no values in unsaved buffers or in tensors that are plain
    attributes. Modules of torch create parameters with torch.empty, whose pages are never touched.
    """

    def move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None  # tied weights depend on it being the same object
        if is_lazy(parameter):
            raise TeacherError(
                f"build() makes a {type(module).__name__} whose {name!r} has no shape before the first call: give it "
                "its size, for example nn.Linear(8, 16) instead of nn.LazyLinear(16)"
            )
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(move_to_meta)  # pyright: ignore[reportArgumentType]  # the stub asks for more than is needed
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _SkipInitialization():
            torch.manual_seed(0)
            built = build()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise TeacherError(
            f"build() reads the values of parameters, which are not loaded yet ({str(error).splitlines()[0]}): let it "
            "only build the module; its weights come from weights="
        ) from error
    finally:
        hook.remove()
    parts: tuple[Any, ...] = (*built, None) if isinstance(built, tuple) else (built, None)
    module, example = parts[:2]
    _check_skeleton(module)
    return module.eval().requires_grad_(False), example


def _check_skeleton(module: nn.Module) -> None:
    """Raise if `build` did not return a module, or if its parameters have memory, or other tensors have no values."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # it is the user's function
        raise TeacherError(
            f"build() returned a {type(module).__name__} instead of a torch.nn.Module: return the teacher's module"
        )
    for name, tensor in list(saved_tensors(module)):
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise TeacherError(
                f"build() left {name!r} on {tensor.device}: a teacher's weights come from weights=, so let build() "
                "only build the module, without loading or moving it"
            )
    for name, tensor in (*unsaved_buffers(module), *_plain_attributes(module)):
        if tensor.is_meta:
            raise TeacherError(
                f"build() created {name!r} on the meta device and no file holds its values: build the module on the "
                f"CPU, where its parameters take no memory either, or register {name!r} as a persistent buffer and "
                "save it"
            )


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are plain attributes, except those that a normalization hook computes before each call."""
    for path, part in module.named_modules():
        hooks: list[Any] = list(part._forward_pre_hooks.values())  # pyright: ignore[reportPrivateUsage]
        computed = {hook.name for hook in hooks if type(hook).__module__ in _NORM_HOOKS}
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and name not in computed:
                yield f"{path}.{name}" if path else name, value


def _match_weights(module: nn.Module, weights: Weights, unused: UnusedNames) -> tuple[dict[str, str], list[str]]:
    """Return the name in the files of each parameter and saved buffer, and the names left over; raise on a mismatch."""
    in_files = set(weights.names())
    tied: dict[int, list[str]] = {}
    for name, tensor in saved_tensors(module):
        tied.setdefault(id(tensor), []).append(name)
    stored: dict[str, str] = {}
    missing: list[str] = []
    for names in tied.values():
        found = [name for name in names if name in in_files]
        if not found:
            missing.append(names[0])
            continue
        _check_tied(weights, found)
        stored.update(dict.fromkeys(names, found[0]))
    known = {*stored, *missing, *(name for name, _ in unsaved_buffers(module))}
    left_over = [name for name in weights.names() if name not in known]
    ignored = set(unused(left_over, known))
    _check_names(module, weights, missing, [name for name in left_over if name not in ignored])
    _check_shapes(module, weights, stored)
    return stored, left_over


def _check_tied(weights: Weights, names: list[str]) -> None:
    if other := first_difference(weights, names):
        raise TeacherError(
            f"build() ties {names[0]!r} and {other!r} to one tensor, but {weights.path} holds two different ones: "
            "let build() make the module without tying them"
        )


def first_difference(weights: Weights, names: Sequence[str]) -> str | None:
    """Return the first of these names whose tensor differs from that of the first name, by a sample of its values."""
    for name in names[1:]:
        first, other = weights.tensor(names[0]), weights.tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype or sample_bytes(other) != sample_bytes(first):
            return name
    return None


def _check_names(module: nn.Module, weights: Weights, missing: list[str], extra: list[str]) -> None:
    kind = type(module).__name__
    if (message := explain_prefix(kind, weights.path, missing, extra)) is not None:
        raise TeacherError(message)
    if prefix := common_prefix(extra, missing):
        raise TeacherError(
            f"{weights.path} holds the weights of a part of {kind}, whose names begin with {prefix!r} in the module: "
            f"let build() return that part, .{prefix[:-1]}"
        )
    problems: list[str] = []
    if missing:
        problems.append(f"{len(missing)} name(s) of the module are not in the file, e.g. {missing[:SHOWN]}")
    if extra:
        problems.append(f"{len(extra)} name(s) in the file are not in the module, e.g. {extra[:SHOWN]}")
    if problems:
        raise TeacherError(
            f"{kind} does not match the weights in {weights.path}: {'; '.join(problems)}; let build() make the module "
            f"whose state dict was saved{_MERGED if hasattr(module, 'base_model_prefix') else ''}"
        )


def explain_prefix(kind: str, path: Path, missing: list[str], extra: list[str]) -> str | None:
    """Return the message if the names in the file differ from those of the module by a prefix."""
    if (prefix := common_prefix(missing, extra)) is None:
        return None
    wrapper = _WRAPPER_PREFIXES.get(prefix)
    return (
        f"{path} holds the weights of {kind} under names that begin with {prefix!r}"
        f"{f', as {wrapper} saves them' if wrapper else ''}: save model.{prefix[:-1]}.state_dict(), or remove the "
        f"prefix once, {{name.removeprefix({prefix!r}): tensor for name, tensor in state.items() if "
        f"name.startswith({prefix!r})}}, and save that"
    )


def common_prefix(names: Sequence[str], others: Sequence[str]) -> str | None:
    """Return the prefix with which each of `names` is among `others`; None if there is none."""
    longer = next((other for other in others if names and other.endswith(f".{names[0]}")), None)
    if longer is None:
        return None
    prefix = longer.removesuffix(names[0])
    return prefix if {f"{prefix}{name}" for name in names} <= set(others) else None


def _check_shapes(module: nn.Module, weights: Weights, stored: dict[str, str]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(module)}
    wrong = [name for name, source in stored.items() if shapes[name] != weights.shape(source)]
    if wrong:
        shown = [f"{name} is {shapes[name]}, in the file {weights.shape(stored[name])}" for name in wrong[:SHOWN]]
        raise TeacherError(
            f"{len(wrong)} tensor(s) of {type(module).__name__} have another shape in {weights.path}: "
            f"{'; '.join(shown)}; build the module with the settings its weights were trained with"
        )


def check_same_teacher(comm: Communicator, frozen: FrozenModel, options: Mapping[str, str]) -> None:
    """Raise on every rank if the ranks passed different options or hold different weights."""
    if comm.alone:
        return
    mine = run_on_every_rank(comm, "reading the teacher", TeacherError, weights_fingerprint, frozen)
    ranks = comm.exchange_objects("comparing teachers", (mine, str(frozen.weights.path), dict(options)))
    for option in options:  # before the weights: the buffers of a Hugging Face folder depend on dtype=
        groups = _group_ranks([theirs[option] for _, _, theirs in ranks])
        if len(groups) > 1:
            values = "; ".join(f"rank(s) {members} passed {option}={value}" for value, members in groups.items())
            raise TeacherError(
                f"ranks request different teachers: {values}; all ranks open a teacher together: pass the same on each"
            )
    groups = _group_ranks([fingerprint for fingerprint, _, _ in ranks])
    if len(groups) > 1:
        paths = "; ".join(f"rank(s) {members} read {ranks[members[0]][1]}" for members in groups.values())
        raise TeacherError(
            f"ranks hold different teachers: {paths}; give all ranks the same files, and let build() make the same "
            "module on each"
        )


def weights_fingerprint(frozen: FrozenModel) -> str:
    """Return a hash of names, shapes, dtypes and a sample of every tensor.

    It differs between two trainings of a model. It does not notice a change of a few elements outside the sample.
    """
    digest = hashlib.sha256()
    for name in sorted(frozen.stored_names()):
        tensor = frozen.weights.tensor(name)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample_bytes(tensor))
    module = frozen.skeleton()
    for name, buffer in unsaved_buffers(module):
        digest.update(name.encode())
        digest.update(sample_bytes(buffer))
    frozen.return_skeleton(module)
    frozen.weights.release()
    return digest.hexdigest()


def code_fingerprint(frozen: FrozenModel) -> dict[str, object]:
    """Return what outputs depend on besides weights and inputs: the module's class, and its code or configuration.

    The code is the source of all classes in the module and of their base classes, with the class of each submodule.
    Functions that they call elsewhere are not included.
    """
    module = frozen.skeleton()
    classes = {name: type(part) for name, part in module.named_modules(remove_duplicate=False)}
    frozen.return_skeleton(module)
    config = frozen.build.config_text() if isinstance(frozen.build, FolderBuilder) else None
    lines = [f"{name} {kind.__qualname__}" for name, kind in classes.items()]
    lines += [_source(kind) for kind in dict.fromkeys(base for kind in classes.values() for base in kind.__mro__)]
    return {
        "module": type(module).__qualname__,
        "code": _sha256("\n".join(lines)) if config is None else None,
        "config.json": None if config is None else _sha256(config),
    }


def _group_ranks(values: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _source(kind: type) -> str:
    """Return the source of a class; empty for classes of torch and Python, and for those typed at a prompt."""
    if kind.__module__.partition(".")[0] in {"torch", *sys.stdlib_module_names}:
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
