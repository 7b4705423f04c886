"""A teacher from a Hugging Face folder: the module that its config.json names, built without its weights."""

import importlib
import json
import re
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.errors import TeacherError
from samestep.teacher.frozen_model import Build, Unused
from samestep.teacher.weight_files import Weights


def build_from_folder(folder: Path, weights: Weights, dtype: torch.dtype | None) -> tuple[Build, Unused]:
    """What builds the module of a folder, and which names of its files the module may do without.

    Nothing is fetched and no code of the folder is run. As transformers does, buffers are computed in the dtype of the
    weights.
    """
    named = _architecture(folder)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise TeacherError(
            f"{folder} is a Hugging Face folder and transformers is not installed: type pip install "
            "'samestep[teacher]', or give build= a function that makes the module"
        ) from error
    kind: Any = getattr(transformers, named, None)
    # The file is not to be trusted: it may name anything that transformers holds, and only a model is made of it.
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise TeacherError(
            f"config.json in {folder} names the architecture {named!r}, which transformers {transformers.__version__} "
            "does not have: give build= a function that makes the module"
        )
    left_out = [re.compile(pattern) for pattern in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return _FromFolder(folder, kind, dtype or _prevailing(weights)), partial(_spare, left_out)


@dataclass(frozen=True)
class _FromFolder:
    """Makes the module of a folder; it can be told to another process, which imports transformers by itself."""

    folder: Path
    kind: Any
    dtype: torch.dtype

    def __call__(self) -> nn.Module:
        """The module, as transformers makes it from its configuration."""
        transformers: Any = importlib.import_module("transformers")
        # without the last word it asks on the terminal whether it may run code of the folder
        config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        config.use_cache = False  # a teacher sees each sequence once
        with _default_dtype(self.dtype):
            model: Any = self.kind(config)
        model.tie_weights()
        return model


def configuration(build: Build) -> str | None:
    """The text of what a module is configured with, however it is laid out; None where no folder makes the module."""
    if not isinstance(build, _FromFolder):
        return None
    return json.dumps(json.loads((build.folder / "config.json").read_text()), sort_keys=True)


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        raise TeacherError(
            f"there is no build= and {folder} holds no config.json that would name the module: give build= a function "
            "that makes it, or the folder of a Hugging Face model"
        )
    try:
        named = json.loads(path.read_text())["architectures"]
    except KeyError:
        named = None
    except (ValueError, TypeError) as error:
        raise TeacherError(f"{path} is no JSON object ({error}): copy or download it anew") from error
    if not isinstance(named, list) or not named or not named[0]:
        raise TeacherError(
            f'{path} names no architecture: add "architectures": ["LlamaForCausalLM"] or the like, or give build= a '
            "function that makes the module"
        )
    return str(named[0])


def _spare(left_out: list[re.Pattern[str]], others: list[str], own: Collection[str]) -> list[str]:
    """Another head, or a pooler, that the file was saved with; never a layer more than the configuration has."""
    kinds = {_any_layer(name) for name in own}
    ignored = (name for name in others if any(pattern.search(name) for pattern in left_out))
    return [*ignored, *(name for name in others if _any_layer(name) not in kinds)]


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def _prevailing(weights: Weights) -> torch.dtype:
    """The dtype of most weights."""
    counted: Counter[torch.dtype] = Counter()
    for name in weights.names():
        if (has := weights.dtype(name)).is_floating_point and has.itemsize > 1:
            counted[has] += weights.bytes_of(name)
    return counted.most_common(1)[0][0] if counted else torch.get_default_dtype()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
