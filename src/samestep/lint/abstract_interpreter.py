"""Follow a script without values: its statements, calls and objects, and record what it would do on the ranks.

Both branches of a condition are followed, the body of a loop once, and functions of the project are entered with what
is known of their arguments. Conditions on the number of ranks are taken to be true, since the question is what the
script does on several. What is not known stays unknown, and rules are silent about it.

`statements` and `expressions` have a function for each type of node, `project_calls` follows functions of the project,
and `library` knows packages.
"""

import ast
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from samestep.findings import Location
from samestep.lint.events import EVENT_FIELDS, Event, Guard, Loop
from samestep.lint.source_files import SourceFile
from samestep.lint.values import (
    ClassValue,
    Function,
    FunctionValue,
    InstanceValue,
    ModuleState,
    Scope,
    Value,
    any_world,
    merge_taints,
)

MAX_STEPS: Final = 60_000
"""Expressions and statements of one script; the rest is not followed, so that no file takes long."""
_EMPTY_EVENTS: Final[dict[str, dict[str, None]]] = {
    kind: dict.fromkeys(("call", *fields)) for kind, fields in EVENT_FIELDS.items()
}
_MAX_NESTING: Final = 150  # of expressions, through calls
Leaves = Literal["", "loop", "function", "program"]


@dataclass(frozen=True)
class Outcome:
    """How a block ends: what every path through it leaves (loop, function, program), and the conditions under which
    the code after it runs.
    """

    leaves: Leaves = ""
    guards: tuple[Guard, ...] = ()
    """Because the other ranks have returned."""
    loop_guards: tuple[Guard, ...] = ()
    """Because the other ranks are at the next iteration, or have left the loop."""


CONTINUES: Final = Outcome()
StatementTable = Mapping[type[ast.AST], Callable[["Interpreter", Any], Outcome | None]]
ExpressionTable = Mapping[type[ast.AST], Callable[["Interpreter", Any], Value]]


@dataclass(eq=False)
class Frame:
    """A function, class or module that is followed now."""

    module: ModuleState
    scope: Scope
    function: Function | None = None
    owner: InstanceValue | None = None
    """`self` of a method."""
    class_value: ClassValue | None = None
    """The class whose method, or whose body, this is."""
    is_class_body: bool = False
    first_guard: int = 0
    """How many conditions are around the call."""
    returns: list[Value] = field(default_factory=list[Value])
    left_attributes: list[tuple[InstanceValue, str, Value]] = field(
        default_factory=list[tuple[InstanceValue, str, Value]]
    )
    """Attributes that branches assigned which return early."""
    yields: list[Value] = field(default_factory=list[Value])


class Interpreter:
    """The state of following one script: names, conditions, loops, calls, and the events so far."""

    def __init__(
        self,
        files: Mapping[str, SourceFile],
        statements: StatementTable,
        expressions: ExpressionTable,
        max_steps: int = MAX_STEPS,
    ) -> None:
        self.files = files
        self._statements = statements
        self._expressions = expressions
        self.modules: dict[str, ModuleState] = {}
        self.events: list[Event] = []
        self.guards: tuple[Guard, ...] = ()
        self.loops: tuple[Loop, ...] = ()
        self.calls: tuple[Location, ...] = ()
        self.contexts: tuple[str, ...] = ()
        self.no_grad = 0
        self.frames: list[Frame] = []
        self.entered: Counter[ast.AST] = Counter()
        """How often each function was followed."""
        self.results: dict[tuple[ast.AST, InstanceValue | None], Value] = {}
        """What functions without arguments, and methods of an object, returned the last time."""
        self.active: set[ast.AST] = set()
        """Functions that are followed now."""
        self.attribute_writes: list[tuple[InstanceValue, str, Value | None]] = []
        """Attributes that were assigned, with what they were before."""
        self._steps = 0
        self._last_step = max_steps
        self._nesting = 0

    @property
    def frame(self) -> Frame:
        """The function or module that is followed now."""
        return self.frames[-1]

    @property
    def is_exhausted(self) -> bool:
        """Whether the script is too large to follow all of it."""
        return self._steps > self._last_step

    @property
    def is_repeated(self) -> bool:
        """Whether what is followed now runs several times: in a loop, or in a hook of Lightning."""
        return bool(self.loops) or any(each.startswith("hook:") for each in self.contexts)

    @contextmanager
    def at_most(self, steps: int) -> Generator[None]:
        """Follow something for some statements and expressions only; the rest of it is left out."""
        saved, self._last_step = self._last_step, min(self._last_step, self._steps + steps)
        yield
        self._last_step = saved

    def load(self, file: SourceFile, is_main: bool = False) -> ModuleState:
        """Follow the statements of a file once."""
        key = str(file.path)
        if key in self.modules:
            return self.modules[key]
        state = self.modules[key] = ModuleState(file, is_main)
        state.scope.names["__name__"] = Value(constant="__main__" if is_main else file.name)
        saved = self.guards, self.loops, self.calls, self.contexts, self.no_grad
        self.guards, self.loops, self.calls, self.contexts, self.no_grad = (), (), (), (), 0
        with self.inside_frame(Frame(state, state.scope)):
            self.block(file.tree.body)
        self.guards, self.loops, self.calls, self.contexts, self.no_grad = saved
        return state

    @contextmanager
    def inside_frame(self, frame: Frame) -> Generator[Frame]:
        """Follow something with the names of a function, class or module."""
        self.frames.append(frame)
        yield frame
        self.frames.pop()

    @contextmanager
    def inside(self, *guards: Guard, context: str = "", no_grad: bool = False) -> Generator[None]:
        """Follow something under conditions, inside of a named context."""
        saved = self.guards, self.contexts, self.no_grad
        self.guards = (*self.guards, *guards)
        self.contexts = (*self.contexts, context) if context else self.contexts
        self.no_grad += no_grad
        yield
        self.guards, self.contexts, self.no_grad = saved

    def locate(self, node: ast.AST) -> Location:
        """The line and column of a node."""
        frame = self.frames[-1]
        locations = frame.module.file.locations
        found = locations.get(node)
        if found is None:
            function = frame.function
            name = "<module>" if function is None else getattr(function, "name", "<lambda>")
            found = locations[node] = frame.module.file.locate(node, name)
        return found

    def emit(self, kind: str, node: ast.AST, **data: Any) -> Event:
        """Record that the script does something here."""
        empty = _EMPTY_EVENTS[kind]
        filled: dict[str, Any] = {**empty, **data}
        if len(filled) > len(empty):
            raise TypeError(f"a {kind!r} event has the fields {sorted(empty)}, got {sorted(data)}")
        event = Event(
            kind, self.locate(node), node, self.guards, self.loops, self.calls, self.no_grad == 0, self.contexts,
            len(self.events), filled,
        )  # fmt: skip
        self.events.append(event)
        return event

    def block(self, statements: Sequence[ast.stmt]) -> Outcome:
        """Follow statements in their order."""
        saved = self.guards
        guards, loop_guards, leaves = list[Guard](), list[Guard](), ""
        for statement in statements:
            self._steps += 1
            if self._steps > self._last_step:
                break
            handler = self._statements.get(type(statement))
            outcome = handler(self, statement) if handler is not None else None
            if outcome is None or outcome is CONTINUES:
                continue
            guards += outcome.guards
            loop_guards += outcome.loop_guards
            self.guards = (*self.guards, *outcome.guards, *outcome.loop_guards)
            if outcome.leaves:
                leaves = outcome.leaves
                break
        self.guards = saved
        if not leaves and not guards and not loop_guards:
            return CONTINUES
        return Outcome(leaves, tuple(guards), tuple(loop_guards))

    def evaluate(self, node: ast.expr) -> Value:
        """What is known of an expression."""
        self._steps += 1
        if self._steps > self._last_step or self._nesting > _MAX_NESTING:
            return Value()
        self._nesting += 1
        handler = self._expressions.get(type(node))
        value = handler(self, node) if handler is not None else self._evaluate_parts(node)
        self._nesting -= 1
        return value

    def _evaluate_parts(self, node: ast.expr) -> Value:
        parts = [self.evaluate(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return Value(self.locate(node), merge_taints(parts), is_world=any_world(parts))

    def set_attribute(self, owner: InstanceValue, name: str, value: Value) -> None:
        """Assign an attribute of an object; branches of a condition are joined later."""
        self.attribute_writes.append((owner, name, owner.attributes.get(name)))
        owner.attributes[name] = value


def function_location(function: FunctionValue) -> Location | None:
    """The line of the definition of a function."""
    if function.node is None or function.module is None:
        return function.location
    return function.module.file.locate(function.node, getattr(function.node, "name", "<lambda>"))


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name, or of what is called."""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
