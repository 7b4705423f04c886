"""Name a rank that makes the others wait in a healthy run, by what the ranks do when the launcher looks.

A `Run` measures how long its ranks wait (samestep.training.rank_times). Other scripts measure nothing, but the launcher
asks their ranks once per second whether they are in a collective. A rank that rarely is while the others are is the one
that they wait for.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from samestep.hang.evidence import Frame, ProcessInfo, Progress, user_frame
from samestep.hang.hang_report import format_frame
from samestep.hang.rank_sentences import is_in_dataset, waits_for_data_worker
from samestep.hang.wait_graph import format_ranks
from samestep.launch.hang_exchange import NodeStore

_SHARE: Final = 0.1  # of the time: a rank that makes the others wait for longer is named
_CERTAINTY: Final = 3.5  # standard deviations by which the ranks must differ
_FIRST_WINDOW, _LONGEST_WINDOW = 30, 960  # looks; as many in the window after that which finds a slow rank
_LEAST_SECONDS: Final = 0.7  # between two looks that count
_EXCHANGE_LOOKS: Final = 30  # after which the launcher of another node reports what it has seen
_LINES: Final = 20  # of each rank, that it reports
_SAVES = "/torch/serialization.py", "/safetensors/torch.py"
_CHECKPOINTS = "/torch/distributed/checkpoint/"

Activity = Literal["data", "checkpoint", "compute"]
_ACTIVITIES: Final[Mapping[Activity, str]] = {
    "data": "reading data",
    "checkpoint": "saving checkpoints",
    "compute": "computing",
}
_REMEDIES: Final[Mapping[Activity, str]] = {
    "data": "pass a larger num_workers to its DataLoader, and check the disk or network from which its node reads",
    "checkpoint": "save less often, and check the disk that this rank writes to",
    "compute": "look at its line, at its GPU with nvidia-smi and at the load of its node: does the script do more on "
    "this rank, or are its samples longer?",
}


@dataclass
class Looks:
    """What a rank did when the launcher looked, in numbers of looks."""

    node: str
    pid: int
    count: int = 0
    waits: int = 0  # in a collective
    different_waits: int = 0  # not in the same collective as at the wait before
    lines: Counter[tuple[Activity, str, int]] = field(default_factory=Counter[tuple[Activity, str, int]])
    """Where it was while it was in no collective: activity, file and line."""

    @property
    def share(self) -> float:
        """Of the time, in which it was in a collective."""
        return self.waits / self.count

    def spent(self, activity: Activity) -> float:
        """The share of the time that it spent with an activity."""
        return sum(count for (each, _, _), count in self.lines.items() if each == activity) / self.count

    def since(self, before: "Looks | None") -> "Looks":
        """What was added since."""
        if before is None:
            return self
        return Looks(
            self.node,
            self.pid,
            self.count - before.count,
            self.waits - before.waits,
            self.different_waits - before.different_waits,
            self.lines - before.lines,
        )

    def copy(self) -> "Looks":
        """A copy that later looks do not change."""
        return Looks(self.node, self.pid, self.count, self.waits, self.different_waits, Counter(self.lines))

    def to_json(self) -> list[Any]:
        """As plain JSON values."""
        lines = [[*line, count] for line, count in self.lines.most_common(_LINES)]
        return [self.node, self.pid, self.count, self.waits, self.different_waits, lines]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> "Looks":
        """The reverse of to_json."""
        node, pid, count, waits, different_waits, lines = value
        looks_at = Counter({(activity, file, line): looks for activity, file, line, looks in lines})
        return cls(node, pid, count, waits, different_waits, looks_at)


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, and what it does meanwhile."""

    rank: int
    looks: Looks  # of the rank, in the last window
    others: float  # the share of the time in which the other ranks are in a collective
    ranks: int
    activity: Activity

    @property
    def cost(self) -> float:
        """The share of the time in which the others wait for it."""
        return self.others - self.looks.share

    @property
    def headline(self) -> str:
        """That the others wait for it, without its line."""
        one = format_ranks([1 - self.rank]) if self.ranks == 2 else ""
        others = f"{one} waits" if one else f"the other {self.ranks - 1} ranks wait"
        return f"rank {self.rank} is slow: {others} for it for about {self.cost:.0%} of the time"


def find_straggler(window: Mapping[int, Looks]) -> Straggler | None:
    """The rank that is least in collectives, if it certainly makes the others wait for more than 10 % of the time.

    A long wait fills several looks, but counts once when the certainty is estimated.
    """
    if len(window) < 2 or not all(looks.count for looks in window.values()):
        return None
    rank = min(window, key=lambda each: window[each].share)
    own, others = window[rank], [looks for each, looks in window.items() if each != rank]
    if not (waits := sum(looks.waits for looks in others)):
        return None
    share = sum(looks.share for looks in others) / len(others)
    independent = own.count * sum(looks.different_waits for looks in others) / waits
    variance = (own.share * (1 - own.share) + share * (1 - share)) / independent if independent else math.inf
    if share - own.share <= max(_SHARE, _CERTAINTY * math.sqrt(variance)):
        return None

    def excess(activity: Activity) -> float:
        return own.spent(activity) - sum(looks.spent(activity) for looks in others) / len(others)

    return Straggler(rank, own, share, len(window), max(_ACTIVITIES, key=excess))


class StragglerWatch:
    """Counts what the ranks of this node do at each look; that of node 0 compares the ranks of all nodes."""

    def __init__(self, node: str, pids: Mapping[int, int], nodes: NodeStore | None) -> None:
        self._looks = {rank: Looks(node, pid) for rank, pid in pids.items()}
        self._nodes = nodes
        self._calls = dict[int, int]()  # of each rank, at its last wait
        self._latest, self._length = 0.0, _FIRST_WINDOW
        self._begin = dict[int, Looks]()  # of the window
        self._suspect: int | None = None  # in the window before
        self._named = set[int]()

    def look(self, progress: Mapping[int, Progress | None], now: float) -> None:
        """Count what the ranks do, unless they measure it themselves or do not all answer."""
        answers = {rank: each for rank, each in progress.items() if each is not None}
        if now < self._latest + _LEAST_SECONDS or len(answers) < len(self._looks):
            return
        if any(each.is_measured or not each.calls for each in answers.values()):
            return
        self._latest = now
        for rank, each in answers.items():
            looks = self._looks[rank]
            looks.count += 1
            if each.is_waiting:
                looks.waits += 1
                looks.different_waits += each.calls != self._calls.get(rank)
                self._calls[rank] = each.calls
            elif (frame := user_frame(each.stack)) is not None:
                looks.lines[find_activity(each.stack), frame.file, frame.line] += 1
        count = max(looks.count for looks in self._looks.values())
        if self._nodes is not None and self._nodes.node != 0 and count % _EXCHANGE_LOOKS == 0:
            self._nodes.set(f"looks/{self._nodes.node}", json.dumps(self.to_json()))

    def to_json(self) -> dict[int, list[Any]]:
        """What the ranks of this node did so far."""
        return {rank: looks.to_json() for rank, looks in self._looks.items()}

    def find(self) -> Straggler | None:
        """On node 0: a rank that was slow in two windows in a row, once."""
        if any(looks.count < self._length + self._begin_count(rank) for rank, looks in self._looks.items()):
            return None
        total = self._read_all()
        window = {rank: looks.since(self._begin.get(rank)) for rank, looks in total.items()}
        found = find_straggler(window)
        before, self._suspect = self._suspect, None if found is None else found.rank
        self._begin = {rank: looks.copy() for rank, looks in total.items()}
        if found is None:
            self._length = min(2 * self._length, _LONGEST_WINDOW)
        if found is None or found.rank != before or found.rank in self._named:
            return None
        self._named.add(found.rank)
        return found

    def _begin_count(self, rank: int) -> int:
        return self._begin[rank].count if rank in self._begin else 0

    def _read_all(self) -> dict[int, Looks]:
        """Of the ranks of all nodes that have reported something."""
        found = dict(self._looks)
        if self._nodes is None:
            return found
        for node in range(1, self._nodes.nodes):
            if text := self._nodes.get(f"looks/{node}"):
                found |= {int(rank): Looks.from_json(value) for rank, value in json.loads(text).items()}
        return found


def find_activity(stack: Sequence[Frame]) -> Activity:
    """What the main thread of a rank does that is in no collective."""
    if is_in_dataset(stack) or waits_for_data_worker(ProcessInfo(0, "running", stacks={"main": list(stack)})):
        return "data"
    is_saving = any(frame.file.endswith(_SAVES) or _CHECKPOINTS in frame.file for frame in stack)
    return "checkpoint" if is_saving else "compute"


def format_straggler(found: Straggler, format_line: Callable[[Frame], str] = format_frame) -> str:
    """Which rank makes the others wait, for how much of the time, what it does, and what to do."""
    rank, looks = f"rank {found.rank}", found.looks
    others = format_ranks([1 - found.rank]) if found.ranks == 2 else "the others"
    lines = [(count, file, line) for (activity, file, line), count in looks.lines.items() if activity == found.activity]
    where = ""
    if lines:
        count, file, line = max(lines)
        where = f": for {count / looks.count:.0%} of the time it is at {format_line(Frame(file, line, ''))}"
    return (
        f"samestep: {found.headline}.\n"
        f"  {rank} (node {looks.node}, pid {looks.pid}) is in collectives for {looks.share:.0%} of the time, {others} "
        f"for {found.others:.0%}\n"
        f"  it spends more time {_ACTIVITIES[found.activity]} than {others}{where}\n"
        f"  what to do: {_REMEDIES[found.activity]}"
    )
