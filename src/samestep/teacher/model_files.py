"""The files of a model: weights, memory-mapped so that all ranks of a node share pages, and Hugging Face folders.

Nothing is downloaded, and no code in a folder is run.
"""

import importlib
import json
import pickle
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from samestep.errors import TeacherError

_INDEX: Final = ".index.json"
_FILE_NAMES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
# Keys under which training scripts store a state dict with torch.save.
_WRAPPERS: Final = ("state_dict", "model", "model_state_dict", "module")
_ACCEPTED: Final = (
    "pass a .safetensors file, a folder of shards with model.safetensors.index.json, a Hugging Face folder, or a file "
    "written by torch.save"
)


@dataclass(frozen=True)
class ByteRange:
    """Where the bytes of a tensor are in a file."""

    path: Path
    start: int
    length: int


class Weights:
    """Named tensors of one or several files. The system loads pages on access, once for all processes of a node.

    `tensor` returns a view of a file: do not write to it, and do not change the files while it is in use.
    """

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self._files = dict(files)
        self._stored_names = {name: name for name in files}
        self._readers: dict[Path, Callable[[str], torch.Tensor]] = {}
        self._ranges: dict[Path, dict[str, ByteRange]] = {}
        tensors = ((name, self.tensor(name)) for name in files)
        self._metadata = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the files."""
        return list(self._metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._metadata[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._metadata[name][1]

    def bytes_of(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        shape, dtype = self._metadata[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of its file."""
        path = self._files[name]
        if path not in self._readers:
            self._readers[path] = _map_file(path)
        return self._readers[path](self._stored_names[name])

    def renamed(self, new_names: Mapping[str, str]) -> "Weights":
        """Return the same tensors with new names for those in `new_names`."""
        found = copy(self)
        found._files, found._metadata, found._stored_names = (
            {new_names.get(name, name): value for name, value in entries.items()}
            for entries in (self._files, self._metadata, self._stored_names)
        )
        return found

    def byte_range(self, name: str) -> ByteRange | None:
        """Return where a tensor is in a safetensors file; None for a torch file, which does not say."""
        path = self._files[name]
        if path.suffix != ".safetensors":
            return None
        if path not in self._ranges:
            self._ranges[path] = _read_ranges(path)
        return self._ranges[path][self._stored_names[name]]

    def release(self) -> None:
        """Unmap the files; the next access maps them again. Tensors that were returned before stay valid."""
        self._readers.clear()


def open_weights(path: str | Path) -> Weights:
    """Open the tensors of a file, a folder of shards, or a Hugging Face folder; reads headers only.

    Raises TeacherError if a shard is missing or truncated, if two shards hold the same name, or if a file is invalid.
    """
    location = Path(path).expanduser().absolute()
    if location.is_dir():
        location = _find_in_folder(location)
    elif location.match("rank-*.safetensors"):
        _reject_checkpoint(location.parent, (location.parent,))
    if not location.exists():
        raise TeacherError(
            f"weights={str(path)!r} does not exist on this machine, and samestep downloads nothing: {_ACCEPTED}"
        )
    if location.is_dir():
        return Weights(location, _shards_without_index(location))
    if location.name.endswith(_INDEX):
        return Weights(location.parent, _shards_of_index(location))
    return Weights(location, dict.fromkeys(_names_in(location), location))


def _find_in_folder(folder: Path) -> Path:
    """Return the index or the single file of a folder; the folder itself if it holds shards without an index."""
    indexes = [folder / f"{name}{_INDEX}" for name in _FILE_NAMES] + sorted(folder.glob(f"*{_INDEX}"))
    for candidate in (*indexes, *(folder / name for name in _FILE_NAMES)):
        if candidate.is_file():
            return candidate
    _reject_checkpoint(folder, (folder,))
    if list(folder.glob("*.safetensors")):
        return folder
    _reject_checkpoint(folder, folder.glob("*/"))
    entries = sorted(entry.name for entry in folder.iterdir())[:8]
    contents = f"holds no weights, only {entries}" if entries else "is empty"
    raise TeacherError(f"the folder {folder} {contents}: {_ACCEPTED}")


def _reject_checkpoint(folder: Path, candidates: Iterable[Path]) -> None:
    """Raise if a candidate is a checkpoint of a run, in which each rank has written its part under its own names."""
    if any((path / "manifest.json").is_file() and (path / "index.json").is_file() for path in candidates):
        raise TeacherError(
            f"{folder} is a samestep checkpoint, to which each rank has written a part: run `samestep checkpoint "
            f"export {shlex.quote(str(folder))} --to teacher.safetensors` and pass that file"
        )


def _shards_of_index(index: Path) -> dict[str, Path]:
    try:
        listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        shards = {name: index.parent / file for name, file in listed.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise TeacherError(
            f"{index} is not a valid index of shards ({error!r}): save or copy the weights again"
        ) from error
    if missing := sorted({path.name for path in shards.values() if not path.is_file()}):
        raise TeacherError(
            f"{index.parent} lacks {len(missing)} of the {len(set(shards.values()))} shards in {index.name}: "
            f"{missing[:5]}; copy or download them"
        )
    held = {path: set(_names_in(path)) for path in set(shards.values())}
    if wrong := [name for name, path in shards.items() if name not in held[path]]:
        raise TeacherError(
            f"{index.name} lists {wrong[0]!r} in {shards[wrong[0]].name}, which does not hold it: index and shards "
            "belong to different models; copy or download both again"
        )
    return shards


def _shards_without_index(folder: Path) -> dict[str, Path]:
    shards: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in _names_in(path):
            if name in shards:
                raise TeacherError(
                    f"{shards[name].name} and {path.name} in {folder} both hold {name!r}, so they are not shards of "
                    "one model: pass the right file, or move the shards to a separate folder"
                )
            shards[name] = path
    return shards


def _names_in(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load_torch_file(path))
    with _explain_errors(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


def _map_file(path: Path) -> Callable[[str], torch.Tensor]:
    if path.suffix != ".safetensors":
        return _load_torch_file(path).__getitem__
    with _explain_errors(path):
        return safe_open(path, framework="pt").get_tensor


def _load_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Load the state dict in a file of torch.save; only tensors are unpickled, so that no code in it can run."""
    with _explain_errors(path):
        # The format of torch < 1.6 cannot be mapped: each process reads its own copy.
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for wrapper in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        found = sorted(map(str, state))[:8] if isinstance(state, Mapping) else type(state).__name__
        raise TeacherError(
            f"{path} holds {found} instead of a mapping of names to tensors: write it with "
            "torch.save(model.state_dict(), path)"
        )
    return {str(name): value.detach() for name, value in state.items()}


@contextmanager
def _explain_errors(path: Path) -> Generator[None]:
    """Turn the errors of libraries on an invalid file into a TeacherError that names the file."""
    size = path.stat().st_size
    if not size:
        raise TeacherError(f"{path} is empty: copy or download it again")
    try:
        yield
    except SafetensorError as error:
        raise TeacherError(
            f"{path} ({size} bytes) is not a complete safetensors file ({error}): it was truncated while it was "
            "copied, or has another format; copy or download it again"
        ) from error
    except Exception as error:  # the unpickler may raise anything on arbitrary bytes
        unpickling = isinstance(error, pickle.UnpicklingError)
        if unpickling and (found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error))):
            raise TeacherError(
                f"{path} holds more than tensors, for example a {found[1]}, and samestep loads only tensors: write it "
                "with torch.save(model.state_dict(), path)"
            ) from error
        # The first line of torch's UnpicklingError explains how to run the code in the file: leave it out.
        detail = "" if unpickling else f": {(str(error).splitlines() or [''])[0]}"
        raise TeacherError(
            f"{path} ({size} bytes) cannot be read as a file of tensors ({type(error).__name__}{detail}): it was "
            "truncated, or has another format; write it with safetensors, or torch.save(model.state_dict(), path)"
        ) from error


def _read_ranges(path: Path) -> dict[str, ByteRange]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries: dict[str, dict[str, list[int]]] = json.loads(file.read(header))
    entries.pop("__metadata__", None)
    return {
        name: ByteRange(path, 8 + header + start, stop - start)
        for name, entry in entries.items()
        for start, stop in (entry["data_offsets"],)
    }


UnusedNames = Callable[[list[str], Collection[str]], Collection[str]]
"""Given names that are only in the files, and the names of the module: returns those that it does not need."""


@dataclass(frozen=True)
class FolderBuilder:
    """Builds the module of a folder from its config.json; can be pickled for a server process."""

    folder: Path
    model_class: Any
    dtype: torch.dtype

    def __call__(self) -> nn.Module:
        """Build the module as transformers does, with buffers computed in `dtype`."""
        transformers: Any = importlib.import_module("transformers")
        # Without trust_remote_code=False transformers asks on the terminal whether it may run code of the folder.
        config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        config.use_cache = False  # a teacher sees each sequence once
        with _default_dtype(self.dtype):
            model: Any = self.model_class(config)
        model.tie_weights()
        return model

    def config_text(self) -> str:
        """Return config.json as normalized JSON, independent of its layout."""
        return json.dumps(json.loads((self.folder / "config.json").read_text()), sort_keys=True)


def build_from_folder(folder: Path, weights: Weights, dtype: torch.dtype | None) -> tuple[FolderBuilder, UnusedNames]:
    """Return a function that builds the module of a folder, and one that tells which names in its files are unused."""
    architecture = _architecture(folder)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise TeacherError(
            f"{folder} is a Hugging Face folder, but transformers is not installed: run pip install "
            "'samestep[teacher]', or pass build= a function that builds the module"
        ) from error
    model_class: Any = getattr(transformers, architecture, None)
    # config.json is not trusted: it may name anything in transformers, and only a model class is accepted.
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise TeacherError(
            f"config.json in {folder} names the architecture {architecture!r}, which transformers "
            f"{transformers.__version__} does not have: pass build= a function that builds the module"
        )
    return FolderBuilder(folder, model_class, dtype or _main_dtype(weights)), partial(_unused_names, model_class)


def unused_names(module: nn.Module, others: list[str], own: Collection[str]) -> list[str]:
    """Return which of the names that are only in a file a transformers module does not need; none for other modules."""
    return _unused_names(module, others, own) if isinstance(getattr(module, "base_model_prefix", None), str) else []


def module_names(module: nn.Module, own: Collection[str], stored: Sequence[str]) -> dict[str, str]:
    """Map names in a file to names of a transformers module, which has the names `own`; empty for other modules."""
    prefix = getattr(module, "base_model_prefix", None)
    return match_names(own, prefix, stored, _renaming(module)) if prefix and isinstance(prefix, str) else {}


def match_names(
    own: Collection[str], prefix: str, stored: Sequence[str], rename: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """Map names in a file to the names `own` of a model with the base model prefix `prefix`, if the two differ.

    A file may hold the base model without its prefix, or the model with a head if the module is the base model. Old
    files say gamma and beta. `rename` applies the renamings of transformers.

    >>> match_names({"bert.norm.weight", "head.weight"}, "bert", ["norm.gamma", "head.weight"])
    {'norm.gamma': 'bert.norm.weight'}
    """
    used, matched = set(stored), dict[str, str]()
    for old in stored:
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", rename(old)))
        candidates = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        new = next((candidate for candidate in candidates if candidate in own), old)
        if old not in own and new not in used:
            matched[old] = new
            used.add(new)
    return matched


def _renaming(module: nn.Module) -> Callable[[str], str]:
    """Return the function with which transformers >= 5 renames tensors of files from earlier versions.

    It is not public in transformers. Without it only the rules of `match_names` apply.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        changes = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
        renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    except (ImportError, AttributeError, TypeError):  # an earlier version, or not a model of transformers after all
        return lambda name: name
    return lambda name: loading.rename_source_key(name, renamings, [])[0]


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        raise TeacherError(
            f"build= is missing and {folder} has no config.json that names the module: pass build= a function that "
            "builds it, or the folder of a Hugging Face model"
        )
    try:
        config = json.loads(path.read_text())
        architectures = config.get("architectures")
    except (ValueError, AttributeError) as error:
        raise TeacherError(f"{path} is not a JSON object ({error}): copy or download it again") from error
    if not isinstance(architectures, list) or not architectures or not architectures[0]:
        raise TeacherError(
            f'{path} does not name an architecture: add "architectures": ["LlamaForCausalLM"] or similar, or pass '
            "build= a function that builds the module"
        )
    return str(architectures[0])


def _unused_names(model_class: Any, others: list[str], own: Collection[str]) -> list[str]:
    """Return names of another head, or of a pooler, in the file; never those of a layer beyond the configuration."""
    patterns: Iterable[str] = getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = {_layer_pattern(name) for name in own}
    return [
        name
        for name in others
        if any(re.search(pattern, name) for pattern in patterns) or _layer_pattern(name) not in known
    ]


def _layer_pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def _main_dtype(weights: Weights) -> torch.dtype:
    """Return the floating-point dtype with the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for name in weights.names():
        if (dtype := weights.dtype(name)).is_floating_point and dtype.itemsize > 1:
            sizes[dtype] += weights.bytes_of(name)
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
