"""Environment variables read as numbers, and quoted with their values in complaints."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from samestep.errors import WorldError

T = TypeVar("T")


@dataclass(frozen=True)
class Variables:
    """The variables of one launcher.

    >>> Variables({"RANK": "3"}, ("RANK",), remedy="unset RANK").number("RANK")
    3
    """

    environ: Mapping[str, str]
    """Where they are looked up."""
    names: tuple[str, ...]
    """Which of them a complaint shows."""
    remedy: str
    """What a person should type where a complaint knows nothing better."""

    def number(self, name: str) -> int | None:
        """A whole number from 0 up, or None where the variable is not set."""
        text = self.environ.get(name)
        if text is None:
            return None
        if not text.strip().isdecimal():
            raise self.error(
                f"{name}={shlex.quote(text)} is not a whole number from 0 up", f"type `unset {name}`, or {self.remedy}"
            )
        return int(text)

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number from 0 up, with the value it has where the variable is not set."""
        found = self.number(name)
        return otherwise if found is None else found

    def text(self, name: str) -> str | None:
        """The text, or None where the variable is not set or empty."""
        return self.environ.get(name) or None

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """The variable as `parse` reads it; what `parse` complains of is told with all variables."""
        try:
            return parse(self.environ[name])
        except ValueError as error:
            raise self.error(f"{name}: {error}", self.remedy) from error

    def pick(self, *names: str) -> str:
        """The first of several names for one thing that is set; the first name where none is."""
        return next((name for name in names if self.text(name)), names[0])

    def error(self, problem: str, remedy: str) -> WorldError:
        """A complaint that shows what is set to what, and what to type instead."""
        known = [name for name in self.names if name in self.environ]
        told = ", ".join(f"{name}={shlex.quote(self.environ[name])}" for name in known) or "nothing"
        missing = ", ".join(name for name in self.names if name not in known)
        return WorldError(f"{problem}. Set: {told}. Not set: {missing or 'nothing'}. To repair it: {remedy}")

    def refuse(self, *checks: tuple[bool, str]) -> None:
        """Raise for the first check that is true."""
        for wrong, problem in checks:
            if wrong:
                raise self.error(problem, self.remedy)
