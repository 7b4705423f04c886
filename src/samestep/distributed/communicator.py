"""The connection between the ranks: how small things cross it, and what is said when a rank is missing."""

import contextlib
import json
import pickle
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from samestep.distributed.process_group import connect_store, meet, open_group, open_talk, store_beside_group
from samestep.environment.world import World
from samestep.errors import CommunicationError, RankMissing
from samestep.torch_private import set_group_timeout, wait_until_released

WORDS = 256  # of 8 bytes: every small exchange has this size, so that unlike ones meet and are told apart
_LABEL = 8  # leading words: 64 bytes that say who called from where
ROOM = WORDS - _LABEL - 1
"""How many values fit."""


def pack(label: str, values: torch.Tensor) -> torch.Tensor:
    """A frame of float64 values; where they do not fit it holds their number only."""
    frame = torch.zeros(WORDS, dtype=torch.int64)  # whole numbers keep every bit of text and of float64 alike
    text = shorten(label).encode().ljust(8 * _LABEL, b"\0")
    frame[:_LABEL] = torch.from_numpy(np.frombuffer(text, dtype=np.int64).copy())
    frame[_LABEL] = values.numel()
    if values.numel() <= ROOM:
        frame[_LABEL + 1 : _LABEL + 1 + values.numel()] = values.view(torch.int64)
    return frame


def label_of(frame: torch.Tensor) -> str:
    """Who sent it, from where."""
    return frame[:_LABEL].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def length_of(frame: torch.Tensor) -> int:
    """How many values its sender has."""
    return int(frame[_LABEL])


def values_of(frame: torch.Tensor) -> torch.Tensor:
    """The values, where they fit."""
    return frame[_LABEL + 1 : _LABEL + 1 + length_of(frame)].view(torch.float64)


def shorten(label: str) -> str:
    """At most 64 bytes; the end says more (the line), so the middle gives way."""
    if len(label.encode()) <= 8 * _LABEL:
        return label
    return f"{label[:24]}~{label[-36:]}".encode()[: 8 * _LABEL].decode(errors="ignore")


_NOT_THE_USERS = (str(Path(__file__).parent.parent), contextlib.__file__)


@dataclass(frozen=True)
class RankStatus:
    """The last thing a rank told of itself."""

    count: int
    """How many common acts it had begun."""
    act: str
    """The act, such as "run.mean"."""
    site: str
    """The user's line it was called from."""
    state: str
    """"in" while it waits there, "at work" while it acts for all, "past" after it, "ended" or "failed" at its end."""
    words: str = ""
    """The reason, where it failed."""

    def tell(self) -> str:
        """The place in words."""
        match self.state:
            case "in":
                return f"waits in {self.act} at {self.site}"
            case "at work":
                return f"is still at work in {self.act} at {self.site}"
            case "past":
                return f"was last in {self.act} at {self.site} and has left it"
            case "failed":
                return f"failed: {self.words}"
            case _:
                return "has ended its run"


class StatusBoard:
    """This rank's place, posted at every common act (about 2 microseconds), and the places of its peers."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.here = RankStatus(0, "Run.start", "the start", "past")

    def enter(self, act: str, site: str) -> None:
        """Tell that this rank has begun a common act."""
        self._post(RankStatus(self.here.count + 1, act, site, "in"))

    def work(self) -> None:
        """Tell that this rank acts for all, which may take its time."""
        self._post(RankStatus(self.here.count, self.here.act, self.here.site, "at work"))

    def leave(self) -> None:
        """Tell that the act is over."""
        self._post(RankStatus(self.here.count, self.here.act, self.here.site, "past"))

    def end(self, failure: str | None) -> None:
        """Tell that this rank's run is over, and of what."""
        state = "failed" if failure else "ended"
        self._post(RankStatus(self.here.count, self.here.act, self.here.site, state, failure or ""))

    def peers(self) -> dict[int, RankStatus]:
        """The last known place of every other rank."""
        keys = {rank: f"place/{rank}" for rank in range(self._size) if rank != self._rank}
        return {
            rank: RankStatus(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def astray(self) -> dict[int, RankStatus]:
        """Peers that will not come to this rank's act: they failed, ended, or wait somewhere else."""
        return {
            rank: place
            for rank, place in self.peers().items()
            if place.state in ("failed", "ended")
            # one that is ahead has passed this act, and what it sent is on its way
            or (place.state == "in" and not self.is_here(place) and place.count <= self.here.count)
        }

    def is_here(self, place: RankStatus) -> bool:
        """Whether a peer's place is the act that this rank is in."""
        return place.state == "in" and (place.count, place.act) == (self.here.count, self.here.act)

    def _post(self, place: RankStatus) -> None:
        self.here = place
        fields = (place.count, place.act, place.site, place.state, place.words)
        self._store.set(f"place/{self._rank}", json.dumps(fields))


def call_site() -> str:
    """The nearest line outside samestep on the stack, as `train.py:31`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack reads source files: far too slow here
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.is_main:`?)"
_SHOWN = 8


def tell(places: dict[int, RankStatus]) -> str:
    """Where ranks are, in words."""
    told = (f"rank {rank} {place.tell()}" for rank, place in sorted(places.items())[:_SHOWN])
    return "; ".join(told) or "no rank tells why"


def gone_astray(rank: int, here: RankStatus, astray: dict[int, RankStatus]) -> RankMissing:
    """Peers that will not come: they failed, ended, or wait somewhere else."""
    rule = "" if all(place.state == "failed" for place in astray.values()) else f": {ORDER_RULE}"
    return RankMissing(f"{_waits(rank, here)}, but {tell(astray)}{rule}")


def come_late(
    rank: int, here: RankStatus, missing: dict[int, RankStatus], waited: float, timeout: float, option: str
) -> RankMissing:
    """Peers that have not come; before the timeout that means that a connection broke."""
    remedy = (
        f"If that rank does honest work, give it time with Run({option}=...); if it is stuck, its stack shows where: "
        "py-spy dump --pid PID"
        if waited >= timeout
        else "The connection to a rank was lost: it died or was killed; look for its last lines"
    )
    return RankMissing(f"{_waits(rank, here)} since {waited:.0f} s: {tell(missing)}. {remedy}")


def store_gone(rank: int, here: RankStatus) -> RankMissing:
    """Nobody can be asked any more."""
    return RankMissing(
        f"{_waits(rank, here)}, and the store of the ranks is gone: the rank that served it has ended or died; look "
        "for its message"
    )


def _waits(rank: int, here: RankStatus) -> str:
    return f"rank {rank} waits in {here.act} at {here.site}"


T = TypeVar("T")
Seen = dict[int, RankStatus]
"""Where peers were when they were looked for."""
_LOOK_AROUND = 1.0  # seconds of waiting after which a rank asks where the others are


class Communicator:
    """All ranks of a run, connected; with one rank there is nothing to connect and every exchange is its own answer.

    Small things travel as frames of one fixed size on the CPU. Two ranks that come to different acts therefore always
    meet in the same collective, see each other's label, and both raise at once instead of hanging or mixing values.
    """

    def __init__(self, world: World, backend: str, start_timeout: float, step_timeout: float) -> None:
        self.world, self.backend = world, backend
        self.timeout = self.start_timeout = start_timeout
        self._step_timeout = step_timeout
        self._store: dist.Store | None = None
        self._places: StatusBoard | None = None
        self._talk: dist.ProcessGroup | None = None
        self._adopted = False
        self._doing_for_all: str | None = None
        self._opened = self._stepping = False

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world.size == 1

    @property
    def store(self) -> dist.Store:
        """The key-value store that all ranks share; there is none for one rank."""
        assert self._store is not None, "the link is not open, or there is one rank only"
        return self._store

    def open(self, device: torch.device) -> None:
        """Connect the ranks; a process group that already stands is used and left standing at the end."""
        self._opened = True
        if self.alone:
            return
        self._adopted = dist.is_initialized()
        base = store_beside_group(self.world) if self._adopted else connect_store(self.world, self.start_timeout)
        # A restarted group must not read dead addresses: torch's agent may go on with the store of the one before.
        generation = f"samestep/{meet(base, self.world.rank, self.world.size, self.start_timeout)}"
        self._store = dist.PrefixStore(f"{generation}/link", base)
        self._places = StatusBoard(self._store, self.world.rank, self.world.size)
        if not self._adopted:
            group_store = dist.PrefixStore(f"{generation}/group", base)
            open_group(group_store, self.world, self.backend, device, self.start_timeout)
        self._talk = open_talk(self.backend, self.start_timeout)

    def close(self) -> None:
        """Disconnect after success: wait for all, then drop the group that `open` made."""
        if self._places is None:
            self._opened = False
            return
        self.exchange("Run.close", [])
        self._opened = False
        self._places.end(None)
        for group in dict.fromkeys((None, self._talk)):
            farewell = torch.zeros(1)  # the first rank may serve the store: it goes when all have said their last word
            dist.all_reduce(farewell, group=group)
            wait_until_released(farewell)
        if not self._adopted:
            dist.destroy_process_group()
        elif self._talk is not None:
            dist.destroy_process_group(self._talk)
        self._places = self._store = self._talk = None

    def abandon(self, failure: str) -> None:
        """Leave after a failure: tell the others why, and destroy nothing, since that can deadlock them."""
        if self._places is not None:
            try:
                self._places.end(failure)
            except RuntimeError:  # the store died with its host: the others know already
                return

    def stepping(self) -> None:
        """From now on ranks are in step: wait for each other by the short timeout."""
        if self._stepping:
            return
        self._stepping, self.timeout = True, self._step_timeout
        if not self.alone and dist.group.WORLD is not None:
            for group in dict.fromkeys((dist.group.WORLD, self._talk or dist.group.WORLD)):
                set_group_timeout(self._step_timeout, group)

    def exchange(self, act: str, values: list[float] | torch.Tensor) -> list[torch.Tensor]:
        """Give every rank the float64 vectors of all ranks, in one collective up to 247 values each."""
        mine = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
        self.refuse_inside_once(act)
        if self.alone:
            return [mine]
        with self.together(act) as label:
            gathered = self._gather(pack(label, mine))
            for rank, frame in enumerate(gathered):
                self._compare_labels(label, rank, label_of(frame))
            lengths = [length_of(frame) for frame in gathered]
            if max(lengths) <= ROOM:
                return [values_of(frame) for frame in gathered]
            padded = torch.zeros(max(lengths), dtype=torch.float64)
            padded[: mine.numel()] = mine
            rest = self._gather(padded.view(torch.int64))
            return [part[:length].view(torch.float64) for part, length in zip(rest, lengths, strict=True)]

    def exchange_objects(self, act: str, value: T) -> list[T]:
        """Like `exchange`, for anything that pickles; meant for rare and small things."""
        data = pickle.dumps(value)
        padded = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.float64).copy()
        return [pickle.loads(part.numpy().tobytes()) for part in self.exchange(act, torch.from_numpy(padded))]

    @contextmanager
    def together(self, act: str) -> Generator[str]:
        """An act of all ranks: posted for the others to see, and explained when one of them does not come."""
        self.refuse_inside_once(act)
        if self._places is None:
            yield act
            return
        site, since = call_site(), time.monotonic()
        self._places.enter(act, site)
        try:
            yield f"{act} at {site}"
        except RuntimeError as error:  # torch's word for a lost peer or a timeout
            self._explain(error, time.monotonic() - since)
        self._places.leave()

    @contextmanager
    def doing_for_all(self, what: str) -> Generator[None]:
        """Mark that this rank acts alone for all of them, so that no common act may begin meanwhile."""
        self._doing_for_all = what
        if self._places is not None:
            self._places.work()
        try:
            yield
        finally:
            self._doing_for_all = None

    def refuse_inside_once(self, act: str) -> None:
        """Raise where a common act is begun inside run.once, or before or after the run: other ranks are not there."""
        if not self._opened:
            raise CommunicationError(
                f"{act} at {call_site()} was called on a run that is not started or is closed: use it inside "
                "`with Run(...) as run:`, or between run.start() and run.close()"
            )
        if self._doing_for_all is not None:
            raise CommunicationError(
                f"{act} at {call_site()} was called inside {self._doing_for_all}: one rank alone is there and the "
                f"others would never come; call {act} outside of the function that run.once runs"
            )

    def look_around(self, since: float, before: Seen, patience: float, act: str | None = None) -> Seen:
        """While waiting, in a common act or for `act`: raise if a peer was twice seen astray, or patience is over."""
        assert self._places is not None
        here = self._places.here if act is None else replace(self._places.here, act=act, site=call_site())
        astray = self._places.astray()
        if settled := {rank: place for rank, place in astray.items() if before.get(rank) == place}:
            raise gone_astray(self.world.rank, here, settled)
        if time.monotonic() - since > patience:
            raise self._late(here, time.monotonic() - since)
        return astray

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.world.size)]
        work = dist.all_gather(gathered, mine, group=self._talk, async_op=True)
        assert work is not None
        since, seen = time.monotonic(), dict[int, RankStatus]()
        pause = timedelta(seconds=min(_LOOK_AROUND, self.timeout / 4))
        while True:
            try:
                work.wait(pause)
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
                seen = self.look_around(since, seen, self.timeout)
            else:
                return gathered

    def _compare_labels(self, mine: str, rank: int, theirs: str) -> None:
        if theirs != shorten(mine):
            raise CommunicationError(
                f"rank {self.world.rank} came to {mine} while rank {rank} came to {theirs}: {ORDER_RULE}"
            )

    def tell_peers(self) -> str | None:
        """Where the other ranks are, for an error that torch raised by itself; None where nothing can be told."""
        if self._places is None:
            return None
        try:
            peers = self._places.peers()
        except RuntimeError:
            return "the store of the ranks is gone: the rank that served it has ended or died; look for its message"
        return f"seen from rank {self.world.rank}: {tell(peers)}"

    def _explain(self, error: RuntimeError, waited: float) -> NoReturn:
        assert self._places is not None
        try:
            astray = self._places.astray()
        except RuntimeError:
            raise store_gone(self.world.rank, self._places.here) from error
        if astray:
            raise gone_astray(self.world.rank, self._places.here, astray) from error
        raise self._late(self._places.here, waited) from error

    def _late(self, here: RankStatus, waited: float) -> RankMissing:
        assert self._places is not None
        missing = {rank: place for rank, place in self._places.peers().items() if not self._places.is_here(place)}
        option = "step_timeout" if self._stepping else "start_timeout"
        return come_late(self.world.rank, here, missing, waited, self.timeout, option)
