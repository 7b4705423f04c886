"""What every rank does for itself and all must succeed in: one that fails alone would leave the others waiting."""

from collections.abc import Callable
from typing import TypeVar

from samestep.errors import TeacherError
from samestep.ranks.link import Link

T = TypeVar("T")


def together(link: Link, act: str, function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` on this rank as all others do; where it fails on some, every rank raises with the reason.

    `function` must not wait for other ranks. Where all ranks fail, each raises its own error.
    """
    value, failure = None, None
    try:
        value = function(*args)
    except Exception as error:  # noqa: BLE001  # whatever it is, the others must hear of it before it goes on
        failure = error
    told = link.exchange_objects(act, None if failure is None else _text(failure))
    if failure is not None:
        raise failure
    failed = {rank: text for rank, text in enumerate(told) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise TeacherError(
            f"{act} failed on rank(s) {sorted(failed)} and not on rank {link.world.rank}; rank {rank}: {text}"
        )
    return value  # pyright: ignore[reportReturnType]  # there was no failure, so the function has returned


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]
