"""What every rank does for itself and all must succeed in: one that fails alone would leave the others waiting."""

import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from samestep.distributed.communicator import Communicator, RankStatus
from samestep.errors import CommunicationError, OnceFailed, TeacherError

T = TypeVar("T")
Per = Literal["run", "node"]
_CHUNK = 4 << 20  # the store takes values up to 8 MiB


@dataclass(frozen=True)
class _Outcome:
    """What became of the function on the rank that ran it."""

    rank: int
    value: bytes | None
    error: bytes | None
    trace: str = ""


def once(link: Communicator, number: int, per: Per, function: Callable[..., T], *args: object) -> T:
    """Run `function` on the first rank of all (or of each node) and give its value to every rank it serves.

    Values travel pickled through the store: meant for paths, numbers and settings rather than gigabytes.
    """
    if per not in ("run", "node"):
        raise CommunicationError(f"run.once does not know per={per!r}: use per='run' or per='node'")
    act = f"run.once({getattr(function, '__name__', type(function).__name__)})"
    if link.alone:
        link.refuse_inside_once(act)
        with link.doing_for_all(act):
            return function(*args)
    world = link.world
    everyone = link.exchange(act, [float(world.node), float(world.is_node_main)])  # nobody starts before all are here
    _forget(link.store, f"once/{number - 1}/{world.rank}")  # all have read it: they came here
    doers = {0: 0} if per == "run" else _first_of_nodes(everyone)
    if world.rank in doers.values():
        _post(link.store, f"once/{number}/{world.rank}", _do(link, act, function, *args))
    mine = doers[0 if per == "run" else world.node]
    with link.together(act):
        outcomes = {rank: _await(link, f"once/{number}/{rank}") for rank in sorted(set(doers.values()))}
    for outcome in outcomes.values():
        if outcome.error is not None:
            _raise_everywhere(act, outcome)
    value = outcomes[mine].value
    assert value is not None
    return pickle.loads(value)


def _first_of_nodes(everyone: list[torch.Tensor]) -> dict[int, int]:
    firsts: dict[int, int] = {}
    for rank, (node, first) in enumerate(everyone):
        if first:
            firsts[int(node)] = rank
    return firsts


def _do(link: Communicator, act: str, function: Callable[..., object], *args: object) -> _Outcome:
    try:
        with link.doing_for_all(act):
            value = function(*args)
        return _Outcome(link.world.rank, pickle.dumps(value), None)
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to every rank
        return _Outcome(link.world.rank, None, _pickled(error), traceback.format_exc())


def _pickled(error: Exception) -> bytes:
    """The error as bytes that come back as the same error, or none where it cannot travel."""
    try:
        frozen = pickle.dumps(error)
        return frozen if type(pickle.loads(frozen)) is type(error) else b""
    except Exception:  # noqa: BLE001  # its own constructor, a local class, an open file inside: its text will do
        return b""


def _raise_everywhere(act: str, outcome: _Outcome) -> NoReturn:
    place = f"raised on rank {outcome.rank} in {act}, for every rank:\n{outcome.trace}"
    if outcome.error:
        error: Exception = pickle.loads(outcome.error)
        error.add_note(place)
        raise error
    raise OnceFailed(place)


def _post(store: dist.Store, key: str, outcome: _Outcome) -> None:
    data = pickle.dumps(outcome)
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    for index, chunk in enumerate(chunks):
        store.set(f"{key}/{index}", chunk)  # pyright: ignore[reportArgumentType]  # bytes too, whatever the stub says
    store.set(key, str(len(chunks)))


def _await(link: Communicator, key: str) -> _Outcome:
    """Wait for the doer as long as it takes to start: it may download for minutes while all others stand by."""
    since, pause, seen = time.monotonic(), 0.001, dict[int, RankStatus]()
    looked = since
    while not link.store.check([key]):
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
        if time.monotonic() - looked > 1.0:
            seen, looked = link.look_around(since, seen, link.start_timeout), time.monotonic()
    chunks = int(link.store.get(key))
    return pickle.loads(b"".join(link.store.get(f"{key}/{index}") for index in range(chunks)))


def _forget(store: dist.Store, key: str) -> None:
    """Free what this rank left in the store at the call before."""
    if store.check([key]):
        for index in range(int(store.get(key))):
            store.delete_key(f"{key}/{index}")
        store.delete_key(key)


def run_on_every_rank(link: Communicator, act: str, function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` on this rank as all others do; where it fails on some, every rank raises with the reason.

    `function` must not wait for other ranks. Where all ranks fail, each raises its own error.
    """
    value, failure = None, None
    try:
        value = function(*args)
    except Exception as error:  # noqa: BLE001  # whatever it is, the others must hear of it before it goes on
        failure = error
    told = link.exchange_objects(act, None if failure is None else _text(failure))
    if failure is not None:
        raise failure
    failed = {rank: text for rank, text in enumerate(told) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise TeacherError(
            f"{act} failed on rank(s) {sorted(failed)} and not on rank {link.world.rank}; rank {rank}: {text}"
        )
    return value  # pyright: ignore[reportReturnType]  # there was no failure, so the function has returned


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]
