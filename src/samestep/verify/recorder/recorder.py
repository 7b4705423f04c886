"""The recorder inside of a rank that `samestep verify` runs: it writes what the script does to a file, event by event.

Every event is one line of JSON that is written at once, since a rank that gloo aborts loses its memory. The observers
in this package call `Recorder.write`; nothing in the script is changed.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

VARIABLE: Final = "SAMESTEP_VERIFY"
"""The variable with the path of the settings of this world, for the processes that the script starts."""
STOPPED: Final = 0
NEEDS_SPAWN: Final = 88
"""Exit code of a rank whose script starts its ranks by itself, with torch.multiprocessing.spawn."""
MARKER: Final = "starts-ranks"
"""The file that says that a script starts its ranks by itself."""
MAX_FRAMES: Final = 12
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|/python3\d*\.zip/|^<")
_SAMESTEP = f"{Path(__file__).resolve().parents[2]}/"

Frame = tuple[str, int, str]


@dataclass(frozen=True)
class RecorderSettings:
    """What the recorder of one world does; written to a file, so that processes of the script find it."""

    folder: str  # for the traces
    world: str  # "many", "one" or "nodes"
    size: int  # ranks
    steps: int  # optimizer steps after which the script is stopped
    batches: int  # of each epoch of a loader
    timeout: float  # seconds that a collective may wait
    port: int
    states: str  # folder of the weights that the other world copies
    roots: list[str] = field(default_factory=list[str])  # folders of user code that is installed
    mirror: tuple[str, str] = ("", "")  # folder of this world, and the one that it mirrors
    device: str = "cpu"
    claims_cuda: bool = False  # whether torch.cuda.is_available() is True on the CPU
    spawns: bool = False  # whether the script starts its ranks by itself
    reference: dict[str, Any] = field(default_factory=dict[str, Any])  # what the world of many ranks did, for world one

    @property
    def is_reference(self) -> bool:
        """Whether this world repeats the steps of the world of many ranks on one rank."""
        return self.world == "one"

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(asdict(self)))


def load_settings(path: str) -> RecorderSettings:
    """Read what `RecorderSettings.save` has written."""
    values: dict[str, Any] = json.loads(Path(path).read_text())
    values["mirror"] = tuple(values["mirror"])
    return RecorderSettings(**values)


class StopScript(BaseException):
    """Ends the script after enough steps; not an Exception, so that scripts do not handle it."""


class Recorder:
    """Writes the events of this process."""

    def __init__(self, settings: RecorderSettings, rank: int | None) -> None:
        self.settings = settings
        self.rank = rank
        self.steps = 0  # optimizer steps so far
        self.pid = os.getpid()
        self._open(f"rank-{rank}" if rank is not None else f"process-{self.pid}")
        self._sites: dict[tuple[Frame, ...], int] = {}
        self._is_user: dict[str, bool] = {}
        self._quiet = threading.local()
        self._main = threading.get_ident()
        self.positions: Callable[[], int] = lambda: 0  # of the trace of lines

    def become_child(self) -> None:
        """Record this process, a fork, from now on, in a separate file."""
        self.pid, self._main = os.getpid(), threading.get_ident()
        self._sites.clear()
        self._open(f"process-{self.pid}")
        self.write("start", rank=None, size=self.settings.size, pid=self.pid)

    def _open(self, name: str) -> None:
        path = f"{self.settings.folder}/{name}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_quiet(self) -> bool:
        """Whether events are not recorded: in the recorder's own work, in other threads and in forked children."""
        return getattr(self._quiet, "depth", 0) > 0 or threading.get_ident() != self._main or os.getpid() != self.pid

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that the recorder was created in, not a child that it has forked."""
        return os.getpid() == self.pid

    @property
    def last_step(self) -> int:
        """The number of optimizer steps after which the script ends, also inside of an epoch."""
        return self.settings.steps + self.settings.batches

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Record nothing inside of the block."""
        self._quiet.depth = getattr(self._quiet, "depth", 0) + 1
        try:
            yield
        finally:
            self._quiet.depth -= 1

    def write(self, kind: str, **values: Any) -> None:
        """Write one event with its time, the number of optimizer steps so far, and the position in the lines."""
        event = {"k": kind, "t": round(time.monotonic(), 6), "s": self.steps, "p": self.positions(), **values}
        os.write(self._file, json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n")

    def write_from_worker(self, worker: int, **values: Any) -> None:
        """Write an event of a data worker, a fork of this process, to a separate file."""
        path = f"{self.settings.folder}/worker-{self.rank}-{worker}-{os.getpid()}.events"
        with open(path, "ab") as file:  # noqa: PTH123
            file.write(json.dumps(values, default=str).encode() + b"\n")

    def site(self, skip: int = 1) -> int:
        """The number of the lines of user code that the caller is called from; new ones are written first."""
        return self.number(tuple(self.user_frames(sys._getframe(skip + 1))))  # pyright: ignore[reportPrivateUsage]

    def number(self, frames: tuple[Frame, ...]) -> int:
        """The number of some lines of user code; new ones are written first."""
        number = self._sites.get(frames)
        if number is None:
            number = self._sites[frames] = len(self._sites)
            self.write("site", id=number, frames=frames)
        return number

    def user_frames(self, frame: FrameType | None) -> list[Frame]:
        """The lines of user code on a stack, the innermost first."""
        found = list[Frame]()
        while frame is not None and len(found) < MAX_FRAMES:
            if self.is_user_code(frame.f_code):
                code = frame.f_code
                found.append((self.original_path(code.co_filename), frame.f_lineno, code.co_qualname))
            frame = frame.f_back
        return found

    def is_user_code(self, code: CodeType) -> bool:
        """Whether code belongs neither to Python nor to an installed package."""
        known = self._is_user.get(code.co_filename)
        if known is None:
            known = self._is_user[code.co_filename] = self._belongs_to_user(code.co_filename)
        return known

    def _belongs_to_user(self, file: str) -> bool:
        path = os.path.abspath(file)  # noqa: PTH100 - without resolving links
        if any(path.startswith(f"{root}/") for root in self.settings.roots):
            return True
        return not (path.startswith(_SAMESTEP) or _LIBRARY.search(file) or _LIBRARY.search(path))

    def original_path(self, file: str) -> str:
        """The path of a file in the user's folder, of which this world has a mirror."""
        if file.startswith("<"):  # code without a file, such as <frozen os>
            return file
        path = os.path.abspath(file)  # noqa: PTH100
        mirror, original = self.settings.mirror
        return f"{original}{path[len(mirror) :]}" if mirror and path.startswith(f"{mirror}/") else path


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module or a class: `around` is called with the original and its arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replacement)


def wrap_all(owners: Sequence[Any], names: Sequence[str], make: Callable[[str, Callable[..., Any]], Any]) -> None:
    """Replace functions of several modules that share them: all of them get the same replacement."""
    for name in names:
        original = next((getattr(owner, name) for owner in owners if hasattr(owner, name)), None)
        if original is None:
            continue
        replacement = make(name, original)
        for owner in owners:
            if getattr(owner, name, None) is original:
                setattr(owner, name, replacement)
