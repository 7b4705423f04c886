"""Losses that compare the rows of a micro-batch with each other, such as contrastive losses without `run.gather`.

Such a loss sees the rows of one rank and one micro-batch, so its value depends on their number. No shape shows it: the
usual cross entropy of a similarity matrix has one loss per row. The autograd graph does show it, as the product of two
computed matrices whose result has a row and a column for each row of the micro-batch.
"""

import torch
from torch.autograd.graph import Node

from samestep.torch_private import matrix_product_shape

_MAX_NODES = 20_000  # of the autograd graph; a graph with more is searched in part
_MAX_CHAIN = 8  # operations between a parameter and the product that uses it: transpose, cast, view


def coupling_warning(losses: torch.Tensor, rows: int, ranks: int, micro_batches: int) -> str | None:
    """The warning for a loss that compares rows of the micro-batch, if other ranks or micro-batches have more rows."""
    if rows < 2 or ranks * micro_batches == 1 or (found := _row_by_row(losses, rows)) is None:
        return None
    return (
        f"the loss compares the {rows} rows of a micro-batch with each other (in a {found} x {found} matrix), but not "
        f"with the other rows of the global batch ({ranks} rank(s) with {micro_batches} micro-batch(es) each), so the "
        "result depends on their number: gather the rows of all ranks with run.gather, as in "
        "`cross_entropy(z1 @ run.gather(z2).T, step.rows, reduction='none')`"
    )


def _row_by_row(losses: torch.Tensor, rows: int) -> int | None:
    """The size of a square matrix with the rows of the micro-batch, or two views of them, along both dimensions."""
    sizes = (rows, 2 * rows)
    pending, seen = [losses.grad_fn], set[Node]()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = [each for each, _ in node.next_functions]
        shape = matrix_product_shape(node)
        if shape is not None and shape[0] == shape[1] and shape[0] in sizes and not any(map(_is_constant, inputs)):
            return shape[0]
        pending += inputs
    return None


def _is_constant(node: Node | None) -> bool:
    """Whether an operand is a parameter, or has no gradient: then the product is that of a layer, row by row."""
    for _ in range(_MAX_CHAIN):
        inputs = [] if node is None else list(node.next_functions)
        if not inputs:  # no gradient, or the node that accumulates a parameter's gradient
            return True
        if len(inputs) > 1:
            return False
        node = inputs[0][0]
    return False
