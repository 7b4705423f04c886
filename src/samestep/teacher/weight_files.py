"""Weights in files, read without a copy: memory-mapped, so that all ranks of a node share the same pages."""

import json
import pickle
import re
import shlex
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from samestep.errors import TeacherError

_INDEX: Final = ".index.json"
_NAMES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
# What training scripts wrap a state in when they save it with torch.save.
_WRAPPERS: Final = ("state_dict", "model", "model_state_dict", "module")


@dataclass(frozen=True)
class Span:
    """Where one tensor's bytes lie."""

    path: Path
    """The file."""
    start: int
    """The first byte."""
    length: int
    """How many there are."""


class Weights:
    """Named tensors of one or several files; pages come into memory when they are looked at, once for all processes.

    What `tensor` gives is a view of the files: do not write to it, nor change the files while it lives.
    """

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        self.path = path
        self._files = dict(files)
        self._stored = {name: name for name in files}
        self._open: dict[Path, Callable[[str], torch.Tensor]] = {}
        self._spans: dict[Path, dict[str, Span]] = {}
        self._known = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._each()}
        self.bytes = sum(self.bytes_of(name) for name in self._known)
        """Bytes of all tensors together."""

    def names(self) -> list[str]:
        """The names of all tensors, as the files list them."""
        return list(self._known)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._known[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """What its elements are."""
        return self._known[name][1]

    def bytes_of(self, name: str) -> int:
        """Bytes of one tensor."""
        shape, dtype = self._known[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as a view of its file."""
        return self._reader(self._files[name])(self._stored[name])

    def renamed(self, called: Mapping[str, str]) -> "Weights":
        """The same tensors under other names: `called` has a new name for each that is to have one."""
        found = copy(self)
        found._files, found._known, found._stored = (
            {called.get(name, name): value for name, value in held.items()}
            for held in (self._files, self._known, self._stored)
        )
        return found

    def span(self, name: str) -> Span | None:
        """Where the bytes of a tensor lie in a file of safetensors; None in a torch file, which does not tell."""
        path = self._files[name]
        if path.suffix != ".safetensors":
            return None
        if path not in self._spans:
            self._spans[path] = _read_spans(path)
        return self._spans[path][self._stored[name]]

    def release(self) -> None:
        """Unmap the files; the next look maps them anew. Tensors that were given out stay good."""
        self._open.clear()

    def _reader(self, path: Path) -> Callable[[str], torch.Tensor]:
        if path not in self._open:
            self._open[path] = _map(path)
        return self._open[path]

    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, path in self._files.items():
            yield name, self._reader(path)(name)


def open_weights(path: str | Path) -> Weights:
    """Find the tensors of a file, a folder of shards, or a Hugging Face folder; nothing is read but headers.

    A name that several shards hold, a shard that is missing or cut off, a file that is none: TeacherError.
    """
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        place = _in_folder(place)
    elif place.match("rank-*.safetensors"):
        _refuse_checkpoint(place.parent, (place.parent,))
    if not place.exists():
        raise TeacherError(
            f"weights={str(path)!r}: there is no such file or folder here, and nothing is downloaded; {_WANTED}"
        )
    if place.is_dir():
        return Weights(place, _unlisted_shards(place))
    if place.name.endswith(_INDEX):
        return Weights(place.parent, _listed_shards(place))
    return Weights(place, dict.fromkeys(_names_in(place), place))


_WANTED: Final = (
    "give a .safetensors file, a folder of shards with model.safetensors.index.json, a Hugging Face folder, or a file "
    "that torch.save wrote"
)


def _in_folder(folder: Path) -> Path:
    """The index or the one file that stands for a folder; the folder itself where shards lie in it without an index."""
    listed = [folder / f"{name}{_INDEX}" for name in _NAMES] + sorted(folder.glob(f"*{_INDEX}"))
    for candidate in (*listed, *(folder / name for name in _NAMES)):
        if candidate.is_file():
            return candidate
    _refuse_checkpoint(folder, (folder,))
    if list(folder.glob("*.safetensors")):
        return folder
    _refuse_checkpoint(folder, folder.glob("*/"))
    held = sorted(entry.name for entry in folder.iterdir())[:8]
    told = f"no weights but {held}" if held else "nothing"
    raise TeacherError(f"the folder {folder} holds {told}: {_WANTED}")


def _refuse_checkpoint(folder: Path, places: Iterable[Path]) -> None:
    """Raise where a place holds a checkpoint of a run, of which each rank has written a part under names of its own."""
    if any((place / "manifest.json").is_file() and (place / "index.json").is_file() for place in places):
        raise TeacherError(
            f"{folder} is a checkpoint of samestep, of which each rank has written a part: type `samestep checkpoint "
            f"export {shlex.quote(str(folder))} --to teacher.safetensors` and give that file"
        )


def _listed_shards(index: Path) -> dict[str, Path]:
    try:
        listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        shards = {name: index.parent / file for name, file in listed.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise TeacherError(f"{index} is no index of shards ({error!r}): save or copy the weights anew") from error
    if gone := sorted({path.name for path in shards.values() if not path.is_file()}):
        listed_files = len(set(shards.values()))
        raise TeacherError(
            f"{index.parent} lacks {len(gone)} of {listed_files} shards that {index.name} lists: {gone[:5]}; copy or "
            "download them"
        )
    held = {path: set(_names_in(path)) for path in set(shards.values())}
    if lost := [name for name, path in shards.items() if name not in held[path]]:
        raise TeacherError(
            f"{index.name} says that {shards[lost[0]].name} holds {lost[0]!r}, and it does not: index and shards are "
            "not of one model; copy or download both anew"
        )
    return shards


def _unlisted_shards(folder: Path) -> dict[str, Path]:
    shards: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in _names_in(path):
            if name in shards:
                raise TeacherError(
                    f"{shards[name].name} and {path.name} in {folder} both hold {name!r}: they are not shards of one "
                    "model; give the file that is meant, or a folder of its own"
                )
            shards[name] = path
    return shards


def _names_in(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_torch_file(path))
    with _reading(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


def _map(path: Path) -> Callable[[str], torch.Tensor]:
    if path.suffix != ".safetensors":
        return _torch_file(path).__getitem__
    with _reading(path):
        return safe_open(path, framework="pt").get_tensor


def _torch_file(path: Path) -> dict[str, torch.Tensor]:
    """The state in a file of torch.save; nothing but tensors is unpickled, so that no code in it can run."""
    with _reading(path):
        # torch's old format, before 1.6, cannot be mapped: each process reads it into memory of its own
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for wrapper in _WRAPPERS:
        if isinstance(held, Mapping) and isinstance(held.get(wrapper), Mapping):
            held = held[wrapper]
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        found = sorted(map(str, held))[:8] if isinstance(held, Mapping) else type(held).__name__
        raise TeacherError(
            f"{path} holds {found} and no plain mapping of names to tensors: write it with "
            "torch.save(model.state_dict(), path)"
        )
    return {str(name): value.detach() for name, value in held.items()}


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Turns what libraries say of a broken file into one sentence that names it."""
    size = path.stat().st_size
    if not size:
        raise TeacherError(f"{path} is empty: copy or download it anew")
    try:
        yield
    except SafetensorError as error:
        raise TeacherError(
            f"{path} ({size} bytes) is no whole file of safetensors ({error}): it was cut off while it was copied, or "
            "is something else; copy or download it anew"
        ) from error
    except pickle.UnpicklingError as error:
        held = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if held is None:
            raise TeacherError(_unreadable(path, size, error)) from error
        raise TeacherError(
            f"{path} holds more than tensors, a {held[1]} among it, and nothing but tensors is read: write it with "
            "torch.save(model.state_dict(), path)"
        ) from error
    except Exception as error:  # an unpickler that is given something else may raise anything
        raise TeacherError(_unreadable(path, size, error)) from error


def _unreadable(path: Path, size: int, error: Exception) -> str:
    # torch's first line of an UnpicklingError is how to run what is in the file
    told = "" if isinstance(error, pickle.UnpicklingError) else f": {(str(error).splitlines() or [''])[0]}"
    return (
        f"{path} ({size} bytes) cannot be read as a file of tensors ({type(error).__name__}{told}): it was cut off, or "
        "is something else; write it with safetensors, or torch.save(model.state_dict(), path)"
    )


def _read_spans(path: Path) -> dict[str, Span]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries: dict[str, dict[str, list[int]]] = json.loads(file.read(header))
    entries.pop("__metadata__", None)
    return {
        name: Span(path, 8 + header + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries.items()
    }
