"""Which files a script writes and reads, and on which ranks."""

import ast
import re
from typing import Final

from samestep.lint.events import Event
from samestep.lint.rule import Analysis
from samestep.lint.values import ChoiceValue, ExternalValue, Value

_NOT_FILES: Final = ("io.BytesIO", "io.StringIO", "BytesIO", "StringIO", "sys.stdout", "sys.stderr", "tempfile")
GLOBAL_RANK: Final = re.compile(r"\bget_rank\(|[\"']RANK[\"']|\bglobal_rank\b")
"""Whether a script knows the rank among all ranks."""
_SYNCHRONIZING: Final = ("collective", "init_group", "wrap", "prepare", "backward", "fit")


def is_on_all_ranks(event: Event) -> bool:
    """Whether all ranks do it at the same time, each for itself, as far as the script says."""
    return event.rank_guard is None and not {"uncalled", "dataset", "lock"} & set(event.contexts)


def is_shared(path: Value) -> bool:
    """Whether a path is the same on all ranks, and a file."""
    if path.differs or path.name.startswith(_NOT_FILES) or isinstance(path, ChoiceValue):
        return False
    return not (isinstance(path, ExternalValue) or path.constant == "/dev/null")


def path_text(event: Event) -> str:
    """The source of a path, for messages."""
    node = path_node(event)
    return ast.unparse(node) if node is not None else "the file"


def path_node(event: Event) -> ast.expr | None:
    """The expression of the path that is written or read."""
    call = event.call
    if call is None or not isinstance(event.node, ast.Call):
        return None
    for position, value in enumerate(call.arguments):
        if value is event.path and position < len(event.node.args):
            return event.node.args[position]
    for keyword in event.node.keywords:
        if keyword.arg is not None and call.keywords.get(keyword.arg) is event.path:
            return keyword.value
    return event.node.func.value if isinstance(event.node.func, ast.Attribute) else None


def is_same_path(one: Event, other: Event) -> bool:
    """Whether two events are about the same file: the same text, value, or expression."""
    if one.path is other.path:
        return True
    if one.path.is_known and other.path.is_known:
        return one.path.constant == other.path.constant
    first, second = path_node(one), path_node(other)
    if first is None or second is None or isinstance(first, ast.Name) or isinstance(second, ast.Name):
        return False
    return ast.unparse(first) == ast.unparse(second) and any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in ast.walk(first)
    )


def is_inside_path(folder: Event, file: Event) -> bool:
    """Whether the path of one event is below that of another: its text begins with it, or its expression names it."""
    if isinstance(folder.path.constant, str) and isinstance(file.path.constant, str):
        return file.path.constant.startswith(folder.path.constant.rstrip("/") + "/")
    outer, inner = path_node(folder), path_node(file)
    if outer is None or inner is None or folder.location.function != file.location.function:
        return False
    text = ast.unparse(outer)
    return any(
        ast.unparse(each) == text for each in ast.walk(inner) if isinstance(each, ast.expr) and each is not inner
    )


def is_synchronized(analysis: Analysis, first: Event, second: Event) -> bool:
    """Whether all ranks wait for each other between two events."""
    between = analysis.events[first.order + 1 : second.order]
    if any(event.kind in _SYNCHRONIZING and event.rank_guard is None for event in between):
        return True
    return any(_waits(event) for event in between)


def _waits(event: Event) -> bool:
    """Whether a loop waits for something: it sleeps until then, or a call is named like a barrier."""
    if event.kind != "call" or (event.rank_guard is not None and not event.rank_guard.is_negated):
        return False
    name = (event.name or "").lower()
    is_polling = name.endswith("sleep") and bool(event.loops) and isinstance(event.loops[-1].node, ast.While)
    return is_polling or any(word in name for word in ("barrier", "wait", "sync", "broadcast", "gather"))


def is_tried(analysis: Analysis, event: Event) -> bool:
    """Whether an exception of it is caught."""
    for file in analysis.files:
        node = file.parents.get(event.node)
        while node is not None:
            if isinstance(node, ast.Try) and node.handlers:
                return True
            node = file.parents.get(node)
    return False
