"""What a rule is: a function that reads what a script would do and yields findings, with the text that they share."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from samestep.findings import Edit, Finding, Location, Severity
from samestep.lint.events import Event, Guard, Loop
from samestep.lint.source_files import SourceFile
from samestep.lint.values import LoaderValue, ModelValue, Value, options_of, sources_of


@dataclass(eq=False)
class Analysis:
    """What one script of a project would do, with the files that it imports."""

    file: SourceFile
    files: Sequence[SourceFile]
    events: Sequence[Event]

    def of(self, *kinds: str) -> list[Event]:
        """The events of some kinds, in their order."""
        if len(kinds) == 1:
            return self._by_kind.get(kinds[0], [])
        return sorted((event for kind in kinds for event in self._by_kind.get(kind, ())), key=lambda each: each.order)

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        found = dict[str, list[Event]]()
        for event in self.events:
            found.setdefault(event.kind, []).append(event)
        return found

    @cached_property
    def is_distributed(self) -> bool:
        """Whether the script runs on several ranks."""
        if self.of("init_group", "wrap", "accelerator", "spawn") or self.is_lightning:
            return True
        return any(not _is_one_device(event.service.options) for event in self.of("fabric"))

    @cached_property
    def is_lightning(self) -> bool:
        """Whether a Trainer runs on several ranks."""
        return any(_has_ranks(event.service.options) for event in self.of("trainer"))

    @property
    def is_plain(self) -> bool:
        """Whether the script uses torch.distributed itself, without a framework."""
        return bool(self.of("init_group", "spawn")) and not self.of("accelerator", "fabric", "trainer")

    def is_in_launcher(self, event: Event) -> bool:
        """Whether the process that starts the ranks does it, before or after them.

        It may call the function of the ranks itself, for a single rank.
        """
        is_outside = not {"spawn", "uncalled"} & set(event.contexts)
        groups = self.of("init_group")
        started = {id(each.node) for each in groups if "spawn" in each.contexts}
        return is_outside and bool(self.of("spawn")) and all(id(each.node) in started for each in groups)

    @cached_property
    def uses_samestep(self) -> bool:
        """Whether the script uses samestep, which does what these rules ask for."""
        return bool(self.of("samestep"))

    def file_of(self, location: Location) -> SourceFile | None:
        """The file of a location."""
        return next((file for file in (self.file, *self.files) if str(file.path) == location.file), None)

    def inside(self, loop: Loop, *kinds: str) -> list[Event]:
        """The events inside of a loop."""
        return [event for event in self.of(*kinds) if loop in event.loops]

    @cached_property
    def loader_loops(self) -> list[tuple[Event, LoaderValue, str]]:
        """Loops over loaders, with what they are for: "train", "eval" or ""."""
        found = list[tuple[Event, LoaderValue, str]]()
        for event in self.of("loop"):
            loop: Loop = event.loop
            for source in sources_of(loop.iterable):
                if isinstance(source, LoaderValue):
                    found.append((event, source, self._role(loop)))
        return found

    def _role(self, loop: Loop) -> str:
        direct = [
            event for event in self.inside(loop, "backward") if event.loops and _innermost_loader(event.loops) is loop
        ]
        if direct:
            return "train"
        calls = [event for event in self.inside(loop, "model_call") if not event.is_grad]
        return "eval" if calls else ""

    @cached_property
    def wrapped(self) -> list[Event]:
        """Where models are wrapped with DDP or FSDP."""
        return [event for event in self.of("wrap") if event.wrapper in ("ddp", "fsdp")]


def _has_ranks(options: dict[str, Value]) -> bool:
    """Whether the options of a Trainer are for several processes."""
    has_options = any(name in options for name in ("devices", "strategy", "num_nodes", "gpus"))
    return has_options and not _is_one_device(options)


def _is_one_device(options: dict[str, Value]) -> bool:
    """Whether the options of a Trainer or of Fabric are for one process."""
    devices = options.get("devices") or options.get("gpus")
    return devices is not None and devices.constant == 1 and "num_nodes" not in options


def _innermost_loader(loops: Sequence[Loop]) -> Loop | None:
    return next((loop for loop in reversed(loops) if loop.loader is not None), None)


@dataclass(frozen=True)
class Rule:
    """A fault that can be seen in the source. The docstring of its module is its page."""

    code: str
    name: str
    severity: Severity
    consequence: str
    repair: str
    find: Callable[[Analysis], Iterator[Finding]]
    is_sure: bool = True
    """Whether a finding is certain from the source alone; `--confirm` hands the others to `samestep verify`."""

    def finding(
        self,
        location: Location,
        summary: str,
        evidence: Sequence[str] = (),
        related: Sequence[Location] = (),
        repair: str = "",
        severity: Severity | None = None,
        consequence: str = "",
        edits: Sequence[Edit] = (),
    ) -> Finding:
        """A finding of this rule."""
        return Finding(
            self.code, self.name, severity or self.severity, location, summary, consequence or self.consequence,
            repair or self.repair, tuple(evidence), (), tuple(related), edits=tuple(edits),
        )  # fmt: skip


def page_of(rule: Rule) -> str:
    """The page of a rule: the docstring of its module, from the source, since `python -OO` removes docstrings."""
    source = inspect.getsource(sys.modules[rule.find.__module__])
    return ast.get_docstring(ast.parse(source)) or ""


def explain(guard: Guard) -> list[str]:
    """Why ranks differ in a condition: where what it depends on comes from."""
    lines = [f"{taint.text} ({taint.location})" for taint in guard.taints]
    what = "not " if guard.is_negated else ""
    return [*lines, f"this runs only if {what}`{guard.text}` ({guard.location})"]


def call_in_guard(event: Event, guard: Guard) -> Location:
    """The line inside of a condition that leads to an event: the event itself, or the call of the function with it."""
    for location in (*event.frames, event.location):
        if (
            location.file == guard.location.file
            and location.function == guard.location.function
            and location.line >= guard.location.line
        ):
            return event.location if _forwards(guard, location.line) else location
    return event.location


def _forwards(guard: Guard, line: int) -> bool:
    """Whether a decorator has the condition: the line in it calls any function with all arguments."""
    calls = [each for each in ast.walk(guard.node or ast.Pass()) if isinstance(each, ast.Call) and each.lineno == line]
    return any(
        any(isinstance(each, ast.Starred) for each in call.args) and any(each.arg is None for each in call.keywords)
        for call in calls
    )


def is_wrapped(value: Value | None) -> bool:
    """Whether a value is a model that DDP or FSDP wraps."""
    return any(
        isinstance(each, ModelValue) and each.wrapper in ("ddp", "fsdp", "prepared") for each in options_of(value)
    )
