"""The connection between the ranks: how it is opened, how small things cross it, and what is said when a rank is missing."""

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from samestep.errors import GroupError, RankMissing, WorldError
from samestep.facts.world import World
from samestep.run.places import Place, Places, call_site
from samestep.run.torch_private import set_group_timeout

T = TypeVar("T")
_LOOK_AROUND = 1.0  # seconds of waiting after which a rank asks where the others are
_LABEL = 8  # leading words of a frame: 64 bytes that say who called from where
_FRAME = (
    256  # words of 8 bytes in a frame: every small exchange has this size, so that unlike ones meet and are told apart
)
_ROOM = _FRAME - _LABEL - 1
_ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.first:`?)"


class Link:
    """All ranks of a run, connected; with one rank there is nothing to connect and every exchange is its own answer.

    Small things travel as frames of one fixed size on the CPU. Two ranks that come to different acts therefore always
    meet in the same collective, see each other's label, and both raise at once instead of hanging or mixing values.
    """

    def __init__(self, world: World, backend: str, start_timeout: float, step_timeout: float) -> None:
        self.world = world
        self.backend = backend
        self.timeout = start_timeout
        self.start_timeout, self._step_timeout = start_timeout, step_timeout
        self._store: dist.Store | None = None
        self._places: Places | None = None
        self._adopted = False
        self._doing_for_all: str | None = None

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
        if self.alone:
            return
        self._adopted = dist.is_initialized()
        if self._adopted:
            base = self._store_beside_group()
        else:
            base = self._connect()
        generation = f"samestep/{self.world.job}/{self.world.restart}"  # a restarted group must not read dead addresses
        self._store = dist.PrefixStore(f"{generation}/link", base)
        self._places = Places(self._store, self.world.rank, self.world.size)
        if not self._adopted:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend,
                store=dist.PrefixStore(f"{generation}/group", base),
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=self.start_timeout),
                device_id=device if self.backend == "nccl" else None,
            )

    def close(self) -> None:
        """Disconnect after success: wait for all, then drop the group that `open` made."""
        if self.alone or self._places is None:
            return
        self.exchange("Run.close", [])
        self._places.end(None)
        if not self._adopted:
            dist.destroy_process_group()
        self._places = self._store = None

    def abandon(self, failure: str) -> None:
        """Leave after a failure: tell the others why, and destroy nothing, since that can deadlock them."""
        if self._places is not None:
            try:
                self._places.end(failure)
            except RuntimeError:  # the store died with its host: the others know already
                return

    def stepping(self) -> None:
        """From now on ranks are in step: wait for each other by the short timeout."""
        if self.timeout == self._step_timeout:
            return
        self.timeout = self._step_timeout
        if not self.alone and dist.group.WORLD is not None:
            set_group_timeout(self._step_timeout, dist.group.WORLD)

    def exchange(self, act: str, values: list[float] | torch.Tensor) -> list[torch.Tensor]:
        """Give every rank the float64 vectors of all ranks, in one collective up to 247 values each."""
        mine = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
        self.refuse_inside_once(act)
        if self.alone:
            return [mine]
        with self.together(act) as label:
            frames = self._gather(_frame(label, mine))
            for rank, frame in enumerate(frames):
                self._compare_labels(label, rank, _label_of(frame))
            lengths = [int(frame[_LABEL]) for frame in frames]
            if max(lengths) > _ROOM:
                padded = torch.zeros(max(lengths), dtype=torch.float64)
                padded[: mine.numel()] = mine
                frames = self._gather(padded.view(torch.int64))
                starts = 0
            else:
                starts = _LABEL + 1
            return [
                frame[starts : starts + length].view(torch.float64)
                for frame, length in zip(frames, lengths, strict=True)
            ]

    def exchange_objects(self, act: str, value: T) -> list[T]:
        """Like `exchange`, for anything that pickles; meant for rare and small things."""
        data = pickle.dumps(value)
        padded = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype=np.float64).copy()
        parts = self.exchange(act, torch.from_numpy(padded))
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    @contextmanager
    def together(self, act: str) -> Iterator[str]:
        """An act of all ranks: posted for the others to see, and explained when one of them does not come."""
        self.refuse_inside_once(act)
        if self.alone or self._places is None:
            yield act
            return
        site = call_site()
        self._places.enter(act, site)
        try:
            yield f"{act} at {site}"
        except RuntimeError as error:  # torch's word for a lost peer or a timeout
            self._explain(error)
        self._places.leave()

    @contextmanager
    def doing_for_all(self, what: str) -> Iterator[None]:
        """Mark that this rank acts alone for all of them, so that no common act may begin meanwhile."""
        self._doing_for_all = what
        try:
            yield
        finally:
            self._doing_for_all = None

    def refuse_inside_once(self, act: str) -> None:
        """Raise where a common act is begun inside run.once: the other ranks are not there."""
        if self._doing_for_all is not None:
            raise GroupError(
                f"{act} at {call_site()} was called inside {self._doing_for_all}: one rank alone is there and the others "
                f"would never come; call {act} outside of the function that run.once runs"
            )

    def look_around(self, since: float, before: dict[int, Place], patience: float) -> dict[int, Place]:
        """While waiting: raise if a peer has gone astray (seen twice in a row) or patience is over."""
        assert self._places is not None
        astray = self._places.astray()
        if settled := {rank: place for rank, place in astray.items() if before.get(rank) == place}:
            self._raise_astray(settled)
        if time.monotonic() - since > patience:
            self._raise_late(time.monotonic() - since)
        return astray

    def _connect(self) -> dist.Store:
        world = self.world
        hosts = world.first and not world.agent_store
        try:
            return dist.TCPStore(
                world.address,
                world.port,
                is_master=hosts,
                timeout=timedelta(seconds=self.start_timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            what = (
                f"rank 0 cannot listen at {world.address}:{world.port}: set MASTER_PORT to a free port"
                if hosts
                else f"rank {world.rank} cannot reach the first rank at {world.address}:{world.port} "
                f"(waited {self.start_timeout:g} s): check that it started, that MASTER_ADDR and MASTER_PORT are right "
                "and that no firewall stands between"
            )
            raise WorldError(f"{what} ({str(error).splitlines()[0]})") from error

    def _store_beside_group(self) -> dist.Store:
        """A store of our own beside a group somebody else opened: the first rank hosts it and tells where."""
        host: list[dist.Store | None] = [None]
        told: list[object] = [None]
        if dist.get_rank() == 0:
            host[0] = dist.TCPStore(self.world.address, 0, is_master=True, wait_for_workers=False)
            told = [host[0].port]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        return host[0] or dist.TCPStore(self.world.address, int(str(told[0])), is_master=False, wait_for_workers=False)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        frames = [torch.empty_like(mine) for _ in range(self.world.size)]
        work = dist.all_gather(frames, mine, async_op=True)
        assert work is not None
        since, seen = time.monotonic(), dict[int, Place]()
        pause = timedelta(seconds=min(_LOOK_AROUND, self.timeout / 4))
        while True:
            try:
                work.wait(pause)
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
                seen = self.look_around(since, seen, self.timeout)
            else:
                return frames

    def _compare_labels(self, mine: str, rank: int, theirs: str) -> None:
        if theirs != _shorten(mine):
            raise GroupError(f"rank {self.world.rank} came to {mine} while rank {rank} came to {theirs}: {_ORDER_RULE}")

    def _explain(self, error: RuntimeError) -> NoReturn:
        try:
            astray = self._places.astray() if self._places else {}
        except RuntimeError:
            raise RankMissing(
                f"{self._here()}, and the first rank's store is gone: rank 0 has ended or died; look for its message"
            ) from error
        if astray:
            self._raise_astray(astray, error)
        self._raise_late(self.timeout, error)

    def _raise_astray(self, astray: dict[int, Place], cause: RuntimeError | None = None) -> NoReturn:
        told = "; ".join(f"rank {rank} {place.tell()}" for rank, place in sorted(astray.items())[:8])
        rule = "" if all(place.state == "failed" for place in astray.values()) else f": {_ORDER_RULE}"
        raise RankMissing(f"{self._here()}, but {told}{rule}") from cause

    def _raise_late(self, waited: float, cause: RuntimeError | None = None) -> NoReturn:
        assert self._places is not None
        missing = {
            r: p for r, p in self._places.peers().items() if (p.count, p.state) < (self._places.here.count, "in")
        }
        told = (
            "; ".join(f"rank {rank} {place.tell()}" for rank, place in sorted(missing.items())[:8])
            or "no rank tells why"
        )
        which = "start_timeout" if self.timeout == self.start_timeout else "step_timeout"
        raise RankMissing(
            f"{self._here()} since {waited:.0f} s: {told}. If that rank does honest work, give it time with "
            f"Run({which}=...); if it is stuck, its stack shows where: py-spy dump --pid PID"
        ) from cause

    def _here(self) -> str:
        assert self._places is not None
        return f"rank {self.world.rank} waits in {self._places.here.act} at {self._places.here.site}"


def _frame(label: str, values: torch.Tensor) -> torch.Tensor:
    frame = torch.zeros(_FRAME, dtype=torch.int64)  # whole numbers keep every bit of text and of float64 alike
    text = _shorten(label).encode().ljust(8 * _LABEL, b"\0")
    frame[:_LABEL] = torch.from_numpy(np.frombuffer(text, dtype=np.int64).copy())
    frame[_LABEL] = values.numel()
    if values.numel() <= _ROOM:
        frame[_LABEL + 1 : _LABEL + 1 + values.numel()] = values.view(torch.int64)
    return frame


def _label_of(frame: torch.Tensor) -> str:
    return frame[:_LABEL].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _shorten(label: str) -> str:
    """At most 64 bytes; the end says more (the line), so the middle gives way."""
    return (
        label
        if len(label.encode()) <= 8 * _LABEL
        else f"{label[:24]}~{label[-36:]}".encode()[: 8 * _LABEL].decode(errors="ignore")
    )
