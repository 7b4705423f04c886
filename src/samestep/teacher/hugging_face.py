"""Models of Hugging Face: build the module of a folder without its weights, and match names in its files.

Nothing is downloaded, and no code in the folder is run.
"""

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.errors import TeacherError
from samestep.teacher.weight_files import Weights

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
    patterns = getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(pattern) for pattern in patterns]
    return FolderBuilder(folder, model_class, dtype or _main_dtype(weights)), partial(_unused_names, ignored)


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


def _unused_names(ignored: list[re.Pattern[str]], others: list[str], own: Collection[str]) -> list[str]:
    """Return names of another head, or of a pooler, in the file; never those of a layer beyond the configuration."""
    known = {_layer_pattern(name) for name in own}
    return [
        name for name in others if any(pattern.search(name) for pattern in ignored) or _layer_pattern(name) not in known
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
