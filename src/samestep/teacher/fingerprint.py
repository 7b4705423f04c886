"""Whether all ranks hold the same teacher."""

import hashlib

from samestep.errors import TeacherError
from samestep.ranks.link import Link
from samestep.teacher.frozen import Frozen, computed
from samestep.teacher.sample import sample
from samestep.teacher.together import together


def fingerprint(frozen: Frozen) -> str:
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


def check_alike(link: Link, frozen: Frozen) -> None:
    """Raise on every rank where some hold another teacher than the others."""
    if link.alone:
        return
    mine = together(link, "reading the teacher", fingerprint, frozen)
    marks = link.exchange_objects("comparing teachers", (mine, str(frozen.weights.path)))
    groups: dict[str, list[int]] = {}
    for rank, (mark, _) in enumerate(marks):
        groups.setdefault(mark, []).append(rank)
    if len(groups) > 1:
        told = "; ".join(f"rank(s) {ranks} read {marks[ranks[0]][1]}" for ranks in groups.values())
        raise TeacherError(
            f"ranks hold different teachers: {told}; give all ranks the same files, and let build() make the same "
            "module on each"
        )
