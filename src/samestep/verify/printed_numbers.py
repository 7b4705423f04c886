"""Which numbers of a printed line come from which expressions: the metrics in it, without times and training losses."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from string import Formatter
from typing import Final

from samestep.findings import Location
from samestep.verify.data_flow import PRINTS
from samestep.verify.source import assignment, calls_at, name_of

NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_PERCENT: Final = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
Part = str | ast.expr
"""A fixed text, or the expression whose value is printed."""


def numbers_of(location: Location, text: str, is_wanted: Callable[[ast.expr], bool]) -> list[str] | None:
    """The numbers in a line that was printed at a location that come from wanted expressions, as they were printed.

    None if the source does not tell which numbers come from which expressions.
    """
    call = next((each for each in calls_at(location) if name_of(each) in PRINTS), None)
    parts = _parts_of_call(location, call) if call is not None else None
    if parts is None:
        return None
    pattern = "".join(re.escape(part) if isinstance(part, str) else "(.*?)" for part in parts)
    match = re.fullmatch(pattern, text, re.DOTALL)
    if match is None:
        return None
    values = [part for part in parts if not isinstance(part, str)]
    wanted = [group for value, group in zip(values, match.groups(), strict=True) if is_wanted(value)]
    return [number for group in wanted for number in NUMBER.findall(group)]


def _parts_of_call(location: Location, call: ast.Call) -> list[Part] | None:
    """What a call prints: its arguments with spaces in between, or a format and its values, as for a logger."""
    first = call.args[0] if call.args else None
    if name_of(call) != "print" and isinstance(first, ast.Constant) and isinstance(first.value, str) and call.args[1:]:
        return _fill(_PERCENT.split(first.value), call.args[1:])
    separator = next((each.value for each in call.keywords if each.arg == "sep"), ast.Constant(" "))
    if not isinstance(separator, ast.Constant):
        return None
    found = list[Part]()
    for argument in call.args:
        parts = _parts(location, argument)
        if parts is None:
            return None
        found += [str(separator.value), *parts] if found else parts
    return found


def _parts(location: Location, value: ast.expr) -> list[Part] | None:
    """The texts and values of an expression; None for several arguments in one."""
    match value:
        case ast.Starred():
            return None
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [text for each in values for text in _parts_of_format(each)]
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod(), right=right):
            return _fill(_PERCENT.split(text), right.elts if isinstance(right, ast.Tuple) else [right])
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return _parts_of_template(text, value)
        case ast.Name(id=name):
            statement = assignment(location, name)
            text = statement.value if isinstance(statement, ast.Assign) else None
            return _parts(location, text) if isinstance(text, ast.JoinedStr) else [value]
        case _:
            return [value]


def _parts_of_format(value: ast.expr) -> Iterator[Part]:
    if isinstance(value, ast.FormattedValue):
        yield value.value
    elif isinstance(value, ast.Constant):
        yield str(value.value)


def _fill(texts: Sequence[str], values: Sequence[ast.expr]) -> list[Part] | None:
    """Texts with a value between each two of them."""
    if len(texts) != len(values) + 1:
        return None
    return [texts[0], *(part for value, text in zip(values, texts[1:], strict=True) for part in (value, text))]


def _parts_of_template(template: str, call: ast.Call) -> list[Part] | None:
    """The texts and values of `"...".format(...)`."""
    named = {each.arg: each.value for each in call.keywords}
    found, position = list[Part](), 0
    for text, field, _, _ in Formatter().parse(template):
        found.append(text)
        if field is None:
            continue
        name = re.split(r"[.\[]", field)[0] or str(position)
        position += 1
        value = named.get(name)
        if name.isdecimal() and int(name) < len(call.args):
            value = call.args[int(name)]
        if value is None:
            return None
        found.append(value)
    return found
