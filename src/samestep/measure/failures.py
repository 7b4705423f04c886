"""Errors of the user's own code, told in one line: what failed, how, and what to do about it."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from samestep.errors import PlanError
from samestep.torch_private import cannot_be_traced

_ASKS_FOR_CUDA = ("cuda", "nvidia driver", "no kernel image")


@contextmanager
def telling(what: str, explain: Callable[[str], str]) -> Generator[None]:
    """Turn what `what` raises inside into a PlanError by `explain`; asking for values is left to the trace."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if cannot_be_traced(error) or isinstance(error, PlanError):
            raise
        said = said_by(error)
        raise PlanError(_without_device(what, said) if _asks_for_cuda(said) else explain(said)) from error


def said_by(error: BaseException) -> str:
    """The kind of an error and the first line of its text.

    >>> said_by(ValueError("no such file"))
    'ValueError: no such file'
    """
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


def first_line(error: BaseException) -> str:
    """The first line of its text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _asks_for_cuda(said: str) -> bool:
    return any(word in said.lower() for word in _ASKS_FOR_CUDA)


def _without_device(what: str, said: str) -> str:
    return (
        f"{what} asks for CUDA ({said}): build the model and its batch without a device; a plan needs none, and Run "
        "moves them to its own"
    )
