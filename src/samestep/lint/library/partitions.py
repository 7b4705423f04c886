"""How scripts divide data by hand, `x[rank::world]` or rounded shares, and orders that differ between ranks."""

import ast
from typing import Final

from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.events import source_text
from samestep.lint.values import (
    ContainerValue,
    IteratorValue,
    Taint,
    TensorValue,
    Value,
    merge_taints,
    options_of,
    sources_of,
)

IS_PART: Final = "is the part of each rank"
"""The end of the text of a taint: each rank has taken its own part of something."""
SPLITS: Final = ("numpy.array_split", "torch.tensor_split", "torch.chunk")
"""Functions that divide something into a list of parts."""
_POSITIONAL: Final = ("enumerate", "zip")
_DISTINCT: Final = ("set", "frozenset", "Counter", "fromkeys", "unique")


def take_part(run: Interpreter, node: ast.AST, rank: Value, world: Value, source: Value, how: str) -> Taint:
    """Record that each rank takes its own part of something; returns why the part differs between ranks."""
    location = run.locate(node)
    run.emit("shard", node, rank=rank, world=world, source=source, how=how)
    return Taint("rank", location, f"`{source_text(node)}` {IS_PART}")


def slice_part(run: Interpreter, owner: Value, node: ast.Subscript) -> tuple[Taint, ...]:
    """Whether a slice is the part of a rank, `x[rank::world]` or `x[rank * n : (rank + 1) * n]`."""
    if not isinstance(node.slice, ast.Slice) or node.slice.lower is None:
        return ()
    lower = run.evaluate(node.slice.lower)
    if not lower.depends_on_rank or _is_within(lower, owner):
        return ()
    if node.slice.step is not None:
        return (take_part(run, node, lower, run.evaluate(node.slice.step), owner, "stride"),)
    upper = run.evaluate(node.slice.upper) if node.slice.upper is not None else Value()
    how = "floor" if lower.is_floored and upper.is_floored else "range"
    if _is_window(node.slice) or (how == "range" and _is_multiple(node.slice)):
        how = "window"
    return (take_part(run, node, lower, Value(), owner, how),)


def split_part(run: Interpreter, owner: Value, index: Value, node: ast.Subscript) -> tuple[Taint, ...]:
    """Whether an item is the part of a rank: `numpy.array_split(x, world)[rank]`."""
    if not isinstance(owner, TensorValue) or owner.name not in SPLITS or not owner.parts or not index.depends_on_rank:
        return ()
    return (take_part(run, node, index, Value(), owner.parts[0], "split"),)


def _is_within(lower: Value, owner: Value) -> bool:
    """Whether a bound depends on the rank only as the owner does: it comes from the size of the rank's own part."""
    reasons = {each.text for each in lower.taints if each.kind == "rank"}
    return reasons <= {each.text for each in owner.taints} and any(each.endswith(IS_PART) for each in reasons)


def _is_window(node: ast.Slice) -> bool:
    """Whether a slice has the same length on all ranks: `x[start : start + length]`."""
    upper = node.upper
    if node.lower is None or not isinstance(upper, ast.BinOp):
        return False
    start = ast.unparse(node.lower)
    while isinstance(upper, ast.BinOp) and isinstance(upper.op, ast.Add):
        if ast.unparse(upper.left) == start:
            return True
        upper = upper.left
    return False


def _is_multiple(node: ast.Slice) -> bool:
    """Whether a slice is a chunk of a size that all ranks share: `x[rank * size : (rank + 1) * size]`."""
    match node.lower, node.upper:
        case (
            ast.BinOp(op=ast.Mult(), left=rank, right=size),
            ast.BinOp(
                op=ast.Mult(),
                left=ast.BinOp(op=ast.Add(), left=next_rank, right=ast.Constant(value=1)),
                right=next_size,
            ),
        ):
            return (ast.unparse(rank), ast.unparse(size)) == (ast.unparse(next_rank), ast.unparse(next_size))
        case _:
            return False


def is_floored(node: ast.AST, left: Value, right: Value, operator: ast.operator) -> bool:
    """Whether a result is a share that was rounded down: `n // world`, and sums and multiples of it.

    A number that is known to be even is taken to be divided without a remainder, unless batches are rounded as well.
    """
    if isinstance(operator, ast.FloorDiv) and right.is_world and not left.is_world:
        if isinstance(node, ast.BinOp) and "batch" in source_text(node.left):
            return False  # the share of a batch, not of the data
        is_product = isinstance(node, ast.BinOp) and isinstance(node.right, ast.BinOp)
        return is_product or not isinstance(left.constant, int) or left.constant % 2 != 0
    if isinstance(operator, ast.FloorDiv) and left.is_world and not right.is_world:
        return True
    return (left.is_floored or right.is_floored) and isinstance(operator, ast.Add | ast.Mult | ast.FloorDiv | ast.Sub)


def unordered_source(value: Value | None) -> ContainerValue | None:
    """What a loop reads in an order that differs between ranks."""
    found = (each for each in sources_of(value) if isinstance(each, ContainerValue) and each.is_unordered)
    return next(found, None)


def number_items(run: Interpreter, iterable: Value, node: ast.AST) -> None:
    """Record that `enumerate` or `zip` gives numbers to items whose order differs between ranks."""
    for option in options_of(iterable):
        if isinstance(option, IteratorValue) and option.kind in _POSITIONAL:
            container = unordered_source(option)
            if container is not None:
                run.emit("by_position", node, container=container)
                continue
            for part in option.sources:
                if is_distinct(part) and own_part(part) is not None:
                    run.emit("numbered", node, source=part)


def is_distinct(value: Value) -> bool:
    """Whether it has each of some values once, such as the words of texts."""
    return value.name.rpartition(".")[2] in _DISTINCT


def own_part(value: Value) -> Taint | None:
    """Why a value has what is in the part of this rank."""
    return next((taint for taint in value.taints if taint.text.endswith(IS_PART)), None)


def first_clock(*values: Value) -> Value:
    """The first value that depends on a clock; otherwise the first one."""
    return next((each for each in values if each.clock is not None), values[0] if values else Value())


def join_taints(values: list[Value], more: tuple[Taint, ...]) -> tuple[Taint, ...]:
    """The reasons of all values, and more."""
    return merge_taints([*values, Value(taints=more)]) if more else merge_taints(values)
