"""Models for other programs: one safetensors file, or a Hugging Face folder as `save_pretrained` writes it.

A Hugging Face folder is written by the classes of transformers and peft themselves, from tensors in host memory: those
of a checkpoint, or those of a run, which rank 0 gathers one by one. Nothing is downloaded, and no code in a folder is
run.
"""

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast
from uuid import uuid4

import torch
from torch import nn

from samestep.checkpoint.checkpoint_folder import find_newest_valid
from samestep.checkpoint.manifest import STATE_FILE, Manifest, disk_error, write_verified
from samestep.checkpoint.parts import (
    FrozenTensor,
    Tensors,
    check_frozen,
    frozen_difference,
    frozen_tensors,
    model_state,
    tensor_names,
    unwrapped_names,
)
from samestep.checkpoint.tensor_storage import FileEntry, read_full_tensor, read_index, safetensors_blocks
from samestep.context import RunContext
from samestep.disk import fsync_folder
from samestep.errors import CheckpointError
from samestep.parallel.fsdp import full_tensor
from samestep.parallel.submodules import frozen_tensor_names
from samestep.torch_private import is_fsdp, is_instance, unsharded_class

_SHOWN: Final = 5  # names in an error message
_TOKENIZER_FILES: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_EXTRA: Final = "pip install 'samestep[huggingface]'"


# One file


def export_model(folder: Path, target: Path, part: str | None = None) -> dict[str, object]:
    """Write a model of the newest valid checkpoint to `target`, and return a summary of it.

    `part` is the name of the model, if the checkpoint has several. One full tensor is in memory at a time.
    """
    path, manifest = find_newest_valid(folder)
    name = _choose_model(path, manifest, part)
    if target.exists():
        raise CheckpointError(f"{target} already exists: choose another file with --to, or remove it")
    _check_parent(target)
    state = json.loads((path / STATE_FILE).read_bytes())[name]
    index = read_index(path, manifest.files)
    entries: list[FileEntry] = []
    for tensor_name in tensor_names(state):
        tensor = index[tensor_name]
        load = partial(read_full_tensor, path, tensor)
        entries.append(FileEntry(tensor_name.removeprefix(f"{name}/"), tensor.dtype, tensor.shape, load))
    size = _write_file(target, entries)
    frozen = len(frozen_tensors(state))
    summary = {"checkpoint": str(path), "step": manifest.step, "file": str(target), "tensors": len(entries)}
    return {**summary, "bytes": size, "frozen": frozen}


def _choose_model(path: Path, manifest: Manifest, part: str | None) -> str:
    models = [name for name, kind in manifest.parts.items() if kind == "model"]
    name = part or (models[0] if len(models) == 1 else None)
    if name not in models:
        found = f"no model {part!r}" if part else f"{len(models)} models"
        raise CheckpointError(f"{path} has {found}: choose one with --part, of {', '.join(models) or 'none'}")
    return name


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder {target.parent} of --to does not exist: create it, or choose another --to")


def _write_file(target: Path, entries: list[FileEntry]) -> int:
    temporary = target.with_name(f"{target.name}.part")
    try:
        temporary.unlink(missing_ok=True)
        size = write_verified(temporary, safetensors_blocks(entries)).bytes
        temporary.rename(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, f"writing {target}") from error
    return size


# A Hugging Face folder


@dataclass(frozen=True)
class PretrainedModel:
    """What else than tensors makes a model of transformers, with peft adapters or without; stored in manifest.json."""

    kind: str  # its class in transformers
    config: dict[str, Any]
    source: str  # the folder that it was loaded from; empty if there is none on this machine
    generation: dict[str, Any] | None = None
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The configuration of each adapter, by name."""
    active: tuple[str, ...] = ()
    """The adapters that are in use, which `merge` adds to the weights."""


def describe_pretrained(module: nn.Module) -> PretrainedModel | None:
    """Describe a model of transformers or peft; None for other modules."""
    model: Any = module
    adapters: dict[str, dict[str, Any]] = {}
    active: tuple[str, ...] = ()
    if is_instance(module, "peft.peft_model", "PeftModel"):
        adapters = {name: _plain_json(config.to_dict()) for name, config in model.peft_config.items()}
        active = tuple(model.active_adapters)
        model = model.get_base_model()
    if not is_instance(model, "transformers.modeling_utils", "PreTrainedModel"):
        return None
    kind = unsharded_class(type(model)) if is_fsdp(cast("object", model)) else type(model)
    source = Path(str(model.name_or_path or "-"))
    generation = getattr(model, "generation_config", None)
    return PretrainedModel(
        kind.__name__,
        json.loads(model.config.to_json_string(use_diff=False)),
        str(source.absolute()) if source.is_dir() else "",
        None if generation is None else json.loads(generation.to_json_string(use_diff=True)),
        adapters,
        active,
    )


def pretrained_to_json(models: Mapping[str, nn.Module]) -> dict[str, object]:
    """Return what manifest.json stores of the models of transformers and peft among these, by name."""
    found = {name: describe_pretrained(model) for name, model in models.items()}
    return {name: asdict(each) for name, each in found.items() if each is not None}


def export_pretrained(
    folder: Path, target: Path, part: str | None = None, base: Path | None = None, merge: bool = False
) -> dict[str, object]:
    """Write a model of the newest valid checkpoint as a Hugging Face folder, and return a summary of it.

    `base` is the folder that training started from, with the tokenizer and the frozen weights; by default the one that
    the checkpoint names. An adapter of peft is written without the base model, or, with `merge`, added to its weights.
    """
    path, manifest = find_newest_valid(folder)
    name = _choose_model(path, manifest, part)
    _check_parent(target)
    stored: Any = manifest.run.get("pretrained")
    if not isinstance(stored, dict) or name not in stored:
        raise CheckpointError(
            f"{path} has no configuration of {name!r}, which was not a model of transformers or peft when it was "
            "saved: leave out --pretrained, --merge and --base, which writes the weights to one file"
        )
    model = PretrainedModel(**stored[name])
    base = base.absolute() if base else None
    if base is None and model.source and Path(model.source).is_dir():
        base = Path(model.source)
    state, index = json.loads((path / STATE_FILE).read_bytes())[name], read_index(path, manifest.files)
    frozen = {each.removeprefix(f"{name}/"): entry for each, entry in frozen_tensors(state).items()}
    tensors = {each.removeprefix(f"{name}/"): read_full_tensor(path, index[each]) for each in tensor_names(state)}

    def write(temporary: Path) -> None:
        _write_pretrained(temporary, model, tensors, frozen, base, merge)
        _copy_tokenizer(base, temporary)

    files = _publish(target, False, write)
    return {"checkpoint": str(path), "step": manifest.step, "folder": str(target), "files": ", ".join(files)}


def save_pretrained(
    context: RunContext, module: nn.Module, folder: str | Path, tokenizer: Any = None, merge: bool = False
) -> None:
    """What `run.save_pretrained` does: rank 0 gathers the tensors in host memory and writes the folder; a collective.

    `tokenizer` is one with a method `save_pretrained`, or a folder that has one; by default the folder that the model
    was loaded from. A folder that already has a model is replaced.
    """
    wrapped = context.find_wrapped(module)
    inner = module if wrapped is None else wrapped.inner
    model = describe_pretrained(inner)
    if model is None:
        raise CheckpointError(
            f"run.save_pretrained got a {type(inner).__name__}, which is not a model of transformers or peft: save its "
            "state with run.once(torch.save, ...), or export it from a checkpoint with `samestep checkpoint export`"
        )
    context.once(_check_tokenizer, tokenizer)
    if wrapped is not None:
        wrapped.reshard()
    left_out = set(map(unwrapped_names(inner), frozen_tensor_names(inner) if model.adapters and not merge else ()))
    tensors: Tensors = {}
    with context.comm.collective("run.save_pretrained"):
        for name, tensor in model_state(inner).items():
            if name not in left_out:
                # not every backend gathers tensors in host memory
                full = full_tensor(tensor, context.device)
                if context.world.is_main:  # merging changes weights in place
                    tensors[name] = full.detach().to("cpu", copy=merge and full is tensor)

    def write(temporary: Path) -> None:
        base = Path(model.source) if model.source else None
        _write_pretrained(temporary, model, tensors, dict.fromkeys(left_out), base, merge)
        if tokenizer is None or isinstance(tokenizer, str | Path):
            _copy_tokenizer(base if tokenizer is None else Path(tokenizer).expanduser(), temporary)
        else:
            tokenizer.save_pretrained(temporary)

    context.once(_publish, Path(folder).expanduser().absolute(), True, write)


def _publish(target: Path, replace: bool, write: Callable[[Path], None]) -> list[str]:
    """Let `write` fill a temporary folder, then rename it; returns the names of the files."""
    is_model = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not (replace and is_model)):
        raise CheckpointError(
            f"{target} already exists{'' if is_model else ' and is not the folder of a model'}: choose another folder, "
            "or remove it"
        )
    temporary = target.with_name(f".{target.name}-{uuid4().hex[:12]}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        fsync_folder(temporary)
        if target.is_dir():
            target.rename(temporary.with_name(f"{temporary.name}-old"))
        temporary.rename(target)
        shutil.rmtree(temporary.with_name(f"{temporary.name}-old"), ignore_errors=True)
        fsync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, f"writing {target}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def _write_pretrained(
    target: Path,
    model: PretrainedModel,
    tensors: Tensors,
    left_out: Mapping[str, FrozenTensor | None],
    base: Path | None,
    merge: bool,
) -> None:
    """Write a folder with these tensors; those `left_out` come from the folder `base` if they are needed."""
    needs_base = bool(left_out) and (merge or not model.adapters)
    if merge and not model.adapters:
        raise CheckpointError(f"the model is a {model.kind} without adapters of peft, so there is nothing to merge")
    if base is not None and not base.is_dir():
        raise CheckpointError(f"the base model {base} is not a folder: pass the one that training started from")
    if needs_base and base is None:
        raise CheckpointError(
            "the checkpoint contains only trainable tensors, and the folder that training started from is not recorded "
            "or not on this machine: pass it with --base"
        )
    module = _build(model, base if needs_base else None, left_out)
    _fill(module, tensors, left_out, needs_base)
    if merge:
        module = module.merge_and_unload(safe_merge=True)
    if model.adapters and not merge:
        _check_adapter_holds(module, tensors, left_out)
        for config in module.peft_config.values():
            config.base_model_name_or_path = str(base) if base else config.base_model_name_or_path
        module.save_pretrained(target, save_embedding_layers=False)
    else:
        if model.generation is not None:
            module.generation_config = _import("transformers").GenerationConfig.from_dict(model.generation)
        module.save_pretrained(target)


def _check_tokenizer(tokenizer: object) -> None:
    is_path = isinstance(tokenizer, str | Path)
    if is_path and not Path(tokenizer).expanduser().is_dir():
        raise CheckpointError(
            f"tokenizer={str(tokenizer)!r} of run.save_pretrained is not a folder: pass a folder with the files of a "
            "tokenizer, or the tokenizer itself"
        )
    if tokenizer is not None and not is_path and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise CheckpointError(
            f"tokenizer= of run.save_pretrained is a {type(tokenizer).__name__} without save_pretrained: pass what "
            "AutoTokenizer.from_pretrained returns, or a folder with the files of a tokenizer"
        )


def _copy_tokenizer(source: Path | None, target: Path) -> None:
    """Copy the files of a tokenizer from the folder of a model, if there is one."""
    for path in {path for pattern in _TOKENIZER_FILES for path in (source.glob(pattern) if source else ())}:
        shutil.copy(path, target)


def _build(model: PretrainedModel, base: Path | None, left_out: Mapping[str, FrozenTensor | None]) -> Any:
    """Build the model without memory for its weights, or with those of the folder `base`."""
    transformers = _import("transformers")
    kind = getattr(transformers, model.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no model {model.kind}: use the version that the model was "
            "trained with; models with code of their own are not supported"
        )
    config: Any = kind.config_class.from_dict(model.config)  # pyright: ignore[reportAttributeAccessIssue]  # a class of transformers
    if base is None:
        with torch.device("meta"):
            module: Any = kind(config)
    else:
        dtypes = [entry.dtype for entry in left_out.values() if entry is not None]
        dtype = getattr(torch, max(set(dtypes), key=dtypes.count).removeprefix("torch."))
        module = kind.from_pretrained(base, config=config, dtype=dtype, local_files_only=True)  # pyright: ignore[reportAttributeAccessIssue]
    for number, (name, settings) in enumerate(model.adapters.items()):
        peft = _import("peft")
        with TemporaryDirectory() as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            adapter = peft.PeftConfig.from_pretrained(folder)
        if number:
            module.add_adapter(name, adapter, low_cpu_mem_usage=True)
        else:
            module.name_or_path = adapter.base_model_name_or_path  # otherwise peft warns that it has changed
            options = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
            module = peft.get_peft_model(module, adapter, adapter_name=name, **options)
    if model.adapters:
        module.base_model.set_adapter(list(model.active))
    return module


def _fill(module: nn.Module, tensors: Tensors, left_out: Mapping[str, FrozenTensor | None], has_base: bool) -> None:
    """Give the model the tensors of a training, and check that the rest are those that it was trained with."""
    own = module.state_dict()
    wrong = [name for name, tensor in tensors.items() if name not in own or own[name].shape != tensor.shape]
    if wrong := [*wrong, *(own.keys() - tensors.keys() - left_out.keys())]:
        raise CheckpointError(
            f"{type(module).__name__}, as it is built from the configuration, has other tensors than the trained "
            f"model: {', '.join(sorted(wrong)[:_SHOWN])}; use the versions of transformers and peft that it was "
            "trained with, and change a model only by its configuration or with peft"
        )
    if has_base:
        known = [(entry, own[name]) for name, entry in left_out.items() if entry is not None]
        remedy = "pass --base the folder that training started from"
        check_frozen([text for entry, tensor in known for text in frozen_difference(entry, tensor)], remedy)
    module.load_state_dict(tensors, strict=False, assign=True)
    if callable(tie := getattr(module, "tie_weights", None)):
        tie()


def _check_adapter_holds(module: Any, tensors: Tensors, left_out: Mapping[str, object]) -> None:
    """Raise if the model trained more than what the folder of an adapter contains."""
    select = _import("peft").get_peft_model_state_dict
    found = [select(module, adapter_name=name, save_embedding_layers=False) for name in module.peft_config]
    held = {tensor.data_ptr() for each in found for tensor in each.values()}
    lost = [name for name, tensor in tensors.items() if tensor.data_ptr() not in held] if left_out else []
    if lost:
        raise CheckpointError(
            f"the folder of an adapter does not contain {len(lost)} trained tensor(s): {', '.join(lost[:_SHOWN])}; "
            "write the whole model with merge=True or --merge, or name their modules in modules_to_save= of the "
            "configuration"
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(f"a Hugging Face folder needs {name}, which is not installed: {_EXTRA}") from error


def _plain_json(value: object) -> Any:
    """Convert sets and enumerations in the configuration of an adapter."""

    def convert(each: object) -> object:
        return sorted(map(str, each)) if isinstance(each, set) else str(each)

    return json.loads(json.dumps(value, default=convert))
