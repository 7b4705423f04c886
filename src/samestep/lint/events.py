"""What a script does: events, with the conditions and loops around them.

Events of a kind carry the fields of `EVENT_FIELDS`; a field that is not known is None. All of them have the fields of
`Event`, and `call`, the `Call` of the library that they come from (None if it is a statement).
"""

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from samestep.findings import Location
from samestep.lint.values import LoaderValue, Scope, Taint, Value, sources_of

_MAX_TEXT: Final = 60

EVENT_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    # statements
    "loop": ("loop",),  # once per loop; loop: Loop
    "assign_attribute": ("owner", "name", "value", "target"),
    "assign_item": ("owner", "key", "value", "target"),
    "return": ("value",),
    "yield": ("value",),
    "break": (),
    "continue": (),
    "raise": (),
    "by_position": ("container",),  # items of an unordered container get numbers: its order matters
    "numbered": ("source",),  # distinct values of the rank's own part get numbers
    "own_mean": ("source", "mean"),  # the mean of rows that depend on the rank is subtracted from them
    "unordered": ("container",),  # a loop over a set or a folder, whose order differs between ranks
    "enter": ("name", "owner"),  # no_sync(), join(), accumulate(): a context manager is created
    # calls of which only the name is known
    "call": ("name", "arguments", "keywords", "owner"),  # owner: the object of a method, None for a function
    "create": ("instance",),  # an object of a class of the project
    "print": ("arguments",),
    "text": ("parts",),  # an f-string
    # data
    "loader": ("loader",),
    "sampler": ("sampler", "length"),  # length: of the dataset
    "iterate": (
        "target",
        "loader",
        "start",
        "result",
    ),  # __iter__ of an own dataset or sampler; its events from start on
    "shard": ("rank", "world", "source", "how"),  # x[rank::world] and others: a part of the data for each rank
    "next": ("source",),  # next(iter(loader))
    "set_epoch": ("target", "epoch"),
    "split": ("name", "generator", "arguments", "keywords"),
    "seed": ("value", "which"),
    "seed_generator": ("owner", "value"),  # owner: a separate generator
    "own_draw": ("name", "owner"),  # owner: a separate generator
    "draw": ("name", "arguments", "generator"),
    # models and gradients
    "model_call": ("model", "arguments", "is_nested"),  # is_nested: inside of a forward
    "wrap": ("wrapper", "model", "inner"),  # wrapper: "ddp" or "fsdp"
    "pretrained": ("keywords",),
    "to_device": ("owner", "device"),
    "mode": ("model", "mode"),  # train() or eval()
    "freeze": ("owner",),
    "unfreeze": ("owner",),
    "backward": ("loss", "via", "service"),  # via: "tensor", "accelerator", "fabric" or "" (manual_backward)
    "clip": ("parameters",),
    "in_place": ("owner", "name", "value"),  # value: of an operator such as `/=`
    "averaged_again": ("before",),  # a mean over the ranks is divided by their number
    "parameters": ("owner",),  # model.parameters() and others
    "optimizer": ("optimizer",),
    "optimizer_step": ("optimizer",),
    "scheduler": ("scheduler",),
    "scheduler_step": ("scheduler", "metric"),
    "zero_grad": ("owner",),
    "state_dict": ("owner", "wrapper"),
    "load_state": ("owner",),
    # processes
    "init_group": (),
    "spawn": ("function",),
    # service: Accelerator, Fabric, a metric; taints: of the tensors before the call
    "collective": ("name", "tensors", "arguments", "keywords", "service", "taints"),
    # files and devices
    "write": ("path", "how"),
    "read": ("path", "how"),
    "torch_load": ("path", "map_location"),
    "folder": ("path", "may_exist"),  # mkdir
    "remove": ("path", "ignores_missing"),
    "logger": ("path", "how"),  # SummaryWriter, wandb.init
    "set_device": ("value",),
    "device": ("value", "index"),
    # frameworks
    "accelerator": ("service",),
    "fabric": ("service",),
    "trainer": ("service",),
    "samestep": ("service",),
    "prepare": ("arguments", "results", "service"),
    "fit": ("trainer", "arguments", "keywords"),
    "log": ("name", "value", "keywords", "method"),  # self.log and self.log_dict of Lightning
}


@dataclass(frozen=True, eq=False)
class Guard:
    """A condition under which something runs."""

    location: Location
    taints: tuple[Taint, ...] = ()
    node: ast.AST | None = None
    """The statement or expression that has the condition: both of its branches have the same node."""
    condition: ast.AST | None = None
    label: str = ""
    """The text of what is not an expression, such as "@rank_zero_only"."""
    is_negated: bool = False
    kind: str = "if"
    """"if", "except", "decorator", "loop", "case", or "try" of what an exception may interrupt."""
    clock: Location | None = None
    """Where a clock is read for the condition: each process reads its own."""

    @cached_property
    def text(self) -> str:
        """The source of the condition, shortened."""
        return self.label or (source_text(self.condition) if self.condition is not None else "")

    @property
    def depends_on_rank(self) -> bool:
        """Whether ranks differ in it because of their numbers."""
        return any(taint.kind == "rank" for taint in self.taints)

    @property
    def differs(self) -> bool:
        """Whether ranks may differ in it."""
        return bool(self.taints)


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop around something."""

    location: Location
    node: ast.AST
    iterable: Value | None = None
    """Of a `for` loop or a comprehension."""
    test: Value | None = None
    """Of a `while` loop."""
    scope: Scope | None = None
    """The names that its body can use."""

    @property
    def loader(self) -> LoaderValue | None:
        """The loader whose batches it reads."""
        return next((each for each in sources_of(self.iterable) if isinstance(each, LoaderValue)), None)


@dataclass(eq=False)
class Event:
    """Something that the script does: creates a loader, calls a model, writes a file."""

    kind: str
    location: Location
    node: ast.AST
    guards: tuple[Guard, ...]
    """Conditions around it, the outermost first, also those around calls that lead here."""
    loops: tuple[Loop, ...]
    frames: tuple[Location, ...]
    """Lines of calls that lead here, the outermost first."""
    is_grad: bool
    """Whether gradients are computed."""
    contexts: tuple[str, ...]
    """Names of `with` blocks around it, "hook:training_step" in a hook of Lightning, "forward" in a forward."""
    order: int
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The fields of `EVENT_FIELDS`; `event.loader` is `event.data["loader"]`."""

    def __getattr__(self, name: str) -> Any:
        data: dict[str, Any] = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"an event has no field {name!r}; a {self.__dict__.get('kind')!r} event has {list(data)}")

    def is_run_with(self, other: "Event") -> bool:
        """Whether one run of the script may do both: not if they are in different functions that nothing calls."""
        if "uncalled" not in self.contexts or "uncalled" not in other.contexts:
            return True
        return self.frames[:1] == other.frames[:1]

    @property
    def rank_guard(self) -> Guard | None:
        """The innermost condition on the rank around it."""
        return next((guard for guard in reversed(self.guards) if guard.depends_on_rank), None)

    @property
    def differing_guard(self) -> Guard | None:
        """The innermost condition around it in which ranks may differ."""
        return next((guard for guard in reversed(self.guards) if guard.differs), None)


def are_opposite(one: Guard, other: Guard) -> bool:
    """Whether a rank for which one condition holds is a rank for which the other does not hold.

    The branches of one `if` are, and so are `if rank == 0` and `if rank != 0` if nothing changes between them.
    """
    if one.node is not None and one.node is other.node:
        return one.is_negated != other.is_negated
    if one.condition is None or other.condition is None or one.location.function != other.location.function:
        return False
    (first, first_holds), (second, second_holds) = _normalize(one.condition), _normalize(other.condition)
    return first == second and (first_holds == one.is_negated) == (second_holds != other.is_negated)


def _normalize(condition: ast.AST) -> tuple[str, bool]:
    """A condition as text without its negation, and whether it is not negated: `rank` means `rank != 0`."""
    match condition:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            text, holds = _normalize(operand)
            return text, not holds
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            return source_text(left), False
        case ast.Compare(left=left, ops=[ast.NotEq() | ast.Gt()], comparators=[ast.Constant(value=0)]):
            return source_text(left), True
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            return f"{source_text(left)} == {source_text(right)}", False
        case _:
            return source_text(condition), True


def source_text(node: ast.AST) -> str:
    """The source of a node, shortened."""
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "..."
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
