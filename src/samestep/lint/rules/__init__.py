"""The rules of `samestep lint`, in the order of their codes."""

from importlib import import_module
from pkgutil import iter_modules

from samestep.lint.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (import_module(f"{__name__}.{each.name}").RULE for each in iter_modules(__path__)), key=lambda rule: rule.code
    )
)
