"""`run.once`: one rank runs a function, all ranks get its result or its exception."""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from samestep.distributed.communicator import Communicator, wait_for_keys
from samestep.errors import CommunicationError, OnceFailed, SamestepError

T = TypeVar("T")
Per = Literal["run", "node"]
_CHUNK = 4 << 20  # the store accepts values up to 8 MiB


def once(comm: Communicator, function: Callable[..., T], *args: object, per: Per = "run") -> T:
    """Run `function` on rank 0 (or on the first rank of each node) and return its value on every rank it serves.

    Values travel pickled through the store: use it for paths, numbers and settings rather than gigabytes.
    """
    if per not in ("run", "node"):
        raise CommunicationError(f"run.once: per={per!r} is not valid; use per='run' or per='node'")
    comm.once_calls += 1
    number, world = comm.once_calls, comm.world
    operation = f"run.once({getattr(function, '__name__', type(function).__name__)})"
    if comm.alone:
        comm.refuse_inside_once(operation)
        with comm.running_once(operation):
            return function(*args)
    # no rank starts before all are here
    nodes = comm.exchange(operation, [float(world.node), float(world.is_node_main)])
    while comm.once_keys:  # all ranks have read what this one posted at the previous call, since they are here
        comm.store.delete_key(comm.once_keys.pop())
    first_ranks = {int(node): rank for rank, (node, is_first) in enumerate(nodes) if is_first}
    runners = {0: 0} if per == "run" else first_ranks
    if world.rank in runners.values():
        with comm.running_once(operation):
            outcome = run_and_pickle(world.rank, function, *args)
        comm.once_keys = _post(comm.store, f"once/{number}", outcome, len(runners))
    with comm.collective(operation):
        outcome = _await(comm, f"once/{number}", runners[0 if per == "run" else world.node])
    return unpickle_outcome(operation, outcome)


def run_on_every_rank(
    comm: Communicator,
    operation: str,
    error: type[SamestepError],
    function: Callable[..., T],
    *args: object,
    describe: Callable[[Exception], str] | None = None,
) -> T:
    """Run `function(*args)` on every rank; if it fails on some, every rank raises. A collective.

    `function` must not wait for other ranks. A rank that failed raises its own error, the others raise `error`. With
    `describe` every rank raises `error` with the description of the first failure.
    """
    value, failure = None, None
    try:
        value = function(*args)
    except Exception as raised:  # noqa: BLE001  # the other ranks must know of any failure before it propagates
        failure = raised
    text = None if failure is None else (describe or _describe)(failure)
    failures = {rank: text for rank, text in enumerate(comm.exchange_objects(operation, text)) if text is not None}
    try:
        if failure is not None and describe is None:
            raise failure
        for rank, text in failures.items():
            if describe is not None:
                raise error(text if comm.alone else f"rank {rank}: {text}") from failure
            raise error(
                f"{operation} failed on rank(s) {sorted(failures)} and not on rank {comm.world.rank}; rank {rank}: "
                f"{text}"
            )
    finally:
        del failure  # its traceback refers to this frame: together they would live until the garbage collector runs
    return value  # pyright: ignore[reportReturnType]  # there was no failure


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


@dataclass(frozen=True)
class Outcome:
    """What the function returned or raised on the rank that ran it, pickled."""

    rank: int
    value: bytes | None
    error: bytes | None
    trace: str = ""


def run_and_pickle(rank: int, function: Callable[..., object], *args: object) -> Outcome:
    """Run `function(*args)`; return its value or its exception."""
    try:
        return Outcome(rank, pickle.dumps(function(*args)), None)
    except Exception as error:  # noqa: BLE001  # every rank raises it, whatever it is
        return Outcome(rank, None, _pickle_error(error), traceback.format_exc())


def _pickle_error(error: Exception) -> bytes:
    """The pickled error, or nothing if it does not unpickle to the same class."""
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else b""
    except Exception:  # noqa: BLE001  # its own constructor, a local class, an open file inside: the traceback is sent
        return b""


def unpickle_outcome(operation: str, outcome: Outcome) -> Any:
    """Return what the function returned, or raise what it raised."""
    if outcome.value is not None:
        return pickle.loads(outcome.value)
    origin = f"raised on rank {outcome.rank} in {operation}, for every rank:\n{outcome.trace}"
    if outcome.error:
        error: Exception = pickle.loads(outcome.error)
        error.add_note(origin)
        raise error
    raise OnceFailed(origin)


def _post(store: dist.Store, key: str, outcome: Outcome, runners: int) -> list[str]:
    """Post an outcome for the other ranks, and the end once all of the `runners` have; returns the keys to delete."""
    data = pickle.dumps(outcome)
    chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    keys = [f"{key}/{outcome.rank}", *(f"{key}/{outcome.rank}/{index}" for index in range(len(chunks)))]
    for chunk_key, chunk in zip(keys[1:], chunks, strict=True):
        store.set(chunk_key, chunk)  # pyright: ignore[reportArgumentType]  # the stub lacks bytes
    store.set(keys[0], str(len(chunks)))
    store.append(f"{key}/failed", f"{outcome.rank} " if outcome.value is None else "")  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
    if store.add(f"{key}/done", 1) < runners:
        return keys
    failed = store.get(f"{key}/failed").split()
    store.set(f"{key}/end", str(min(map(int, failed))) if failed else "")
    return [*keys, f"{key}/failed", f"{key}/done", f"{key}/end"]


def _await(comm: Communicator, key: str, runner: int) -> Outcome:
    """What the function did on `runner`, or on the lowest rank where it raised.

    Waits up to `start_timeout`: the function may download for minutes while all other ranks wait.
    """
    wait_for_keys(comm, [f"{key}/end"])
    key = f"{key}/{int(comm.store.get(f'{key}/end') or runner)}"
    return pickle.loads(b"".join(comm.store.get(f"{key}/{index}") for index in range(int(comm.store.get(key)))))
