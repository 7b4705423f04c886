"""Where each rank is, told through the store, so that a rank that does not come can be named."""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

_NOT_THE_USERS = (str(Path(__file__).parent.parent), contextlib.__file__)


@dataclass(frozen=True)
class Place:
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


class Places:
    """This rank's place, posted at every common act (about 2 microseconds), and the places of its peers."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.here = Place(0, "Run.start", "the start", "past")

    def enter(self, act: str, site: str) -> None:
        """Tell that this rank has begun a common act."""
        self._post(Place(self.here.count + 1, act, site, "in"))

    def work(self) -> None:
        """Tell that this rank acts for all, which may take its time."""
        self._post(Place(self.here.count, self.here.act, self.here.site, "at work"))

    def leave(self) -> None:
        """Tell that the act is over."""
        self._post(Place(self.here.count, self.here.act, self.here.site, "past"))

    def end(self, failure: str | None) -> None:
        """Tell that this rank's run is over, and of what."""
        state = "failed" if failure else "ended"
        self._post(Place(self.here.count, self.here.act, self.here.site, state, failure or ""))

    def peers(self) -> dict[int, Place]:
        """The last known place of every other rank."""
        keys = {rank: f"place/{rank}" for rank in range(self._size) if rank != self._rank}
        return {
            rank: Place(*json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def astray(self) -> dict[int, Place]:
        """Peers that will not come to this rank's act: they failed, ended, or wait somewhere else."""
        return {
            rank: place
            for rank, place in self.peers().items()
            if place.state in ("failed", "ended")
            # one that is ahead has passed this act, and what it sent is on its way
            or (place.state == "in" and not self.is_here(place) and place.count <= self.here.count)
        }

    def is_here(self, place: Place) -> bool:
        """Whether a peer's place is the act that this rank is in."""
        return place.state == "in" and (place.count, place.act) == (self.here.count, self.here.act)

    def _post(self, place: Place) -> None:
        self.here = place
        fields = (place.count, place.act, place.site, place.state, place.words)
        self._store.set(f"place/{self._rank}", json.dumps(fields))


def call_site() -> str:
    """The nearest line outside samestep on the stack, as `train.py:31`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack reads source files: far too slow here
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
