"""Whether all ranks hold the same teacher.

A cache asks the same of the run that filled it, and of the module's code too, which all ranks have from one script.
"""

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence

from samestep.distributed.communicator import Communicator
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.teacher.frozen_model import FrozenModel, computed, sample
from samestep.teacher.hugging_face import configuration


def fingerprint(frozen: FrozenModel) -> str:
    """A hash of names, shapes, dtypes and of a sample of every tensor: two trainings of one model differ in it.

    It does not see a change of a few elements between those that it looks at.
    """
    digest = hashlib.sha256()
    for name in sorted(frozen.names()):
        tensor = frozen.weights.tensor(name)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample(tensor))
    module = frozen.skeleton()
    for name, buffer in computed(module):
        digest.update(name.encode())
        digest.update(sample(buffer))
    frozen.take_back(module)
    frozen.weights.release()
    return digest.hexdigest()


def recipe(frozen: FrozenModel) -> dict[str, object]:
    """What outputs depend on beside weights and inputs: the module's class, and its code or its configuration.

    The code is that of all classes in the module, and of those they are made of, where it can be read, beside which
    class stands where. What they call elsewhere is not seen.
    """
    module = frozen.skeleton()
    parts = {name: type(part) for name, part in module.named_modules(remove_duplicate=False)}
    frozen.take_back(module)
    configured = configuration(frozen.build)
    told = [f"{name} {kind.__qualname__}" for name, kind in parts.items()]
    told += [_source(kind) for kind in dict.fromkeys(base for part in parts.values() for base in part.__mro__)]
    return {
        "module": type(module).__qualname__,
        "code": _digest("\n".join(told)) if configured is None else None,
        "config.json": None if configured is None else _digest(configured),
    }


def check_alike(link: Communicator, frozen: FrozenModel, asked: Mapping[str, str]) -> None:
    """Raise on every rank where some were asked for another teacher than the others, or hold another one."""
    if link.alone:
        return
    mine = run_on_every_rank(link, "reading the teacher", fingerprint, frozen)
    told = link.exchange_objects("comparing teachers", (mine, str(frozen.weights.path), dict(asked)))
    for option in asked:  # before the weights: of a folder, buffers depend on dtype=
        groups = _grouped([theirs[option] for _, _, theirs in told])
        if len(groups) > 1:
            said = "; ".join(f"rank(s) {ranks} say {option}={value}" for value, ranks in groups.items())
            raise TeacherError(
                f"ranks ask for different teachers: {said}; a teacher is opened by all ranks together: say the same on "
                "each"
            )
    groups = _grouped([mark for mark, _, _ in told])
    if len(groups) > 1:
        read = "; ".join(f"rank(s) {ranks} read {told[ranks[0]][1]}" for ranks in groups.values())
        raise TeacherError(
            f"ranks hold different teachers: {read}; give all ranks the same files, and let build() make the same "
            "module on each"
        )


def _grouped(values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks by what they told."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _source(kind: type) -> str:
    """The text of a class, or nothing: torch's and Python's change by version, what was typed at a prompt has none."""
    if kind.__module__.partition(".")[0] in {"torch", *sys.stdlib_module_names}:
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
