"""Fingerprints of a teacher: do all ranks hold the same one, and does a cache belong to it?"""

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel, sample_bytes, unsaved_buffers
from samestep.teacher.hugging_face import FolderBuilder


def check_same_teacher(comm: Communicator, frozen: FrozenModel, options: Mapping[str, str]) -> None:
    """Raise on every rank if the ranks passed different options or hold different weights."""
    if comm.alone:
        return
    mine = run_on_every_rank(comm, "reading the teacher", weights_fingerprint, frozen)
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
