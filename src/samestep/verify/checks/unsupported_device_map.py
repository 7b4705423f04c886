"""A device map that the loader does not know.

What it compares: nothing; it explains the error of `from_pretrained` and `load_checkpoint_and_dispatch` for a string
such as "cpu" that is not a strategy, and finds the line that sets it.

Fault: `load_checkpoint_and_dispatch(model, path, device_map="cpu")`.

Repair: `device_map={"": "cpu"}`.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.source import tree_of

_KEY = "device_map"


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for the error in every rank."""
    for trace in worlds.many:
        message = trace.ending.message
        if trace.ending.error == "ValueError" and _KEY in message:
            location = _assignment(worlds) or first(trace.ending.site)
            yield CHECK.finding(location, f"the model cannot be loaded: {message.splitlines()[0][:200]}")
            return


def _assignment(worlds: Worlds) -> Location | None:
    """The executed line that sets the device map to a string."""
    for file in worlds.files:
        for node in ast.walk(tree_of(file)):
            match node:
                case ast.Assign(
                    targets=[ast.Subscript(slice=ast.Constant(value="device_map"))], value=ast.Constant(value=str())
                ):
                    line = node.lineno
                case ast.keyword(arg="device_map", value=ast.Constant(value=str())):
                    line = node.value.lineno
                case _:
                    continue
            if any((file, line) in trace.executed for trace in worlds.many):
                return Location(file, line)
    return None


CHECK = Check(
    "SS702",
    "unsupported-device-map",
    "error",
    "the script ends before it trains",
    'pass a mapping, device_map={"": "cpu"}, or one of the strategies that the message names',
    find,
)
