"""Who waits for whom: the collective that each rank waits in, which ranks have not called it, and where calls differ.

All ranks of a process group call the same collectives in the same order, so a collective is identified by its group and
its number.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, takewhile
from pathlib import PurePath

from samestep.hang.evidence import Collective, Frame, RankEvidence, is_samestep, is_user_code, user_frame
from samestep.messages import format_list

_NAMES = {"all_reduce_barrier": "barrier", "broadcast_oop": "broadcast", "allreduce": "all_reduce"}
_NAME_ENDS = ("_coalesced", "_base", "_into_tensor", "_tensor", "_single")
_SAME_SIZE = {"all_reduce", "broadcast", "reduce", "reduce_scatter"}  # every rank must pass as many elements
_SAME_SIZE_IF_PENDING = {"all_gather", "gather"}  # with NCCL, sizes that differ are valid and complete
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_PEER = re.compile(r"(\d+)\s*(?:->|<-)\s*(\d+)")
_SHOWN_TENSORS = 3
_DEFAULT_GROUPS = ("0", "default_pg")
_SYNCHRONIZES = re.compile(r"\.(item|cpu|tolist|numpy|wait|synchronize|backward|to)\(|\bprint\(|\bfloat\(|\bbool\(")
_SAMESTEP_CALLS = {  # by module
    "metric_sync": "metric sync",
    "once": "run.once",
    "checkpoint": "checkpoint.save",
    "tensor_storage": "run.checkpoint",
    "restore": "run.checkpoint",
    "replica_check": "comparing replicas",
    "gradient_checks": "comparing backward passes",
    "batchnorm": "BatchNorm statistics",
    "materialize": "comparing models",
    "gradients": "gradients",
    "shard": "run.shard",
    "stream": "run.stream",
    "lifecycle": "Run.start",
    "process_group": "Run.start",
}
_INSIDE_SAMESTEP = "samestep control message"
_UNRECORDED = (  # end of the file, functions, what the rank waits in; the flight recorder does not show these
    ("/samestep/distributed/once.py", ("_await",), "run.once"),
    ("/samestep/distributed/process_group.py", ("rendezvous", "connect_store", "init_process_group"), "Run.start"),
    ("/torch/distributed/rendezvous.py", ("_create_c10d_store", "_env_rendezvous_handler"), "init_process_group"),
    (
        "/torch/distributed/distributed_c10d.py",
        ("_store_based_barrier", "init_process_group", "_new_process_group_helper"),
        "init_process_group",
    ),
    ("/torch/distributed/distributed_c10d.py", ("monitored_barrier",), "monitored_barrier"),
)

GroupKey = tuple[str, str, tuple[int, ...]]  # backend, which counts by itself, name and members


def operation(collective: Collective) -> str:
    """The name of a collective in torch.distributed; backends have their own, such as `nccl:_all_gather_base`.

    >>> operation(Collective("0", 1, "nccl:_reduce_scatter_base", [], [], 0, True, 600))
    'reduce_scatter'
    """
    name = collective.name.rpartition(":")[2].strip("_").lower()
    for end in _NAME_ENDS:
        name = name.removesuffix(end)
    return _NAMES.get(name, name)


def is_unrecorded(collective: Collective) -> bool:
    """Whether it has no number, because only the stack of the rank shows it: recv over gloo, init_process_group."""
    return not collective.number and not collective.is_p2p


def elements(collective: Collective) -> int:
    """How many elements this rank passes."""
    return sum(math.prod(shape) for shape in collective.shapes)


def describe_call(collective: Collective, stack: Sequence[Frame] = ()) -> str:
    """A collective as people read it: "all_reduce #40 (DDP gradients, 264,970 elements)", "run.mean".

    `stack` is of the main thread, and serves if the collective has none, because a thread of C++ has called it.
    """
    frames = collective.stack or (stack if in_backward(stack) else ())
    if name := _samestep_call(frames):
        return f"{name} ({operation(collective)} #{collective.number})" if collective.number else name
    count = elements(collective) if operation(collective) != "barrier" else 0
    purpose = _purpose(frames, operation(collective))
    if not collective.stack and (collective.backend, operation(collective)) == ("nccl", "all_reduce"):
        purpose = "DDP gradients"  # a thread of autograd has called it
    inside = ", ".join(filter(None, [purpose, f"{count:,} element{'s' * (count != 1)}" if count else ""]))
    number = f" #{collective.number}" if collective.number and not collective.is_p2p else ""
    name = operation(collective) if purpose else _python_name(frames) or operation(collective)
    return f"{name}{number}" + (f" ({inside})" if inside else "")


def is_called_by_script(collective: Collective, stack: Sequence[Frame] = ()) -> bool:
    """Whether the script calls a collective itself, not DDP, FSDP, a layer or samestep; `stack` as in describe_call."""
    frames = collective.stack or (stack if in_backward(stack) else ())
    return bool(frames) and not _samestep_call(frames) and not _purpose(frames, operation(collective))


def describe_with_tensors(call: Collective) -> str:
    """A collective with what it was called with: "all_reduce #6 with float32 [8]"."""
    dtypes = [_DTYPES.get(dtype, dtype) for dtype in call.dtypes]
    if len(dtypes) != len(call.shapes):
        dtypes = [dtypes[0] if dtypes else ""] * len(call.shapes)
    texts = [f"{dtype} {shape}".strip() for shape, dtype in zip(call.shapes, dtypes, strict=True)]
    number = f" #{call.number}" if call.number and not call.is_p2p else ""
    return f"{operation(call)}{number}" + (f" with {format_list(texts, _SHOWN_TENSORS)}" if texts else "")


def _samestep_call(frames: Sequence[Frame]) -> str:
    """The public name of the samestep call that a collective belongs to; empty if samestep did not call it."""
    inside = [frame for frame in frames if is_samestep(frame)]
    for frame in inside:
        module = PurePath(frame.file).stem
        if module == "collectives" and not frame.function.startswith("_"):
            return f"run.{frame.function}"
        if (module, frame.function) in (("communicator", "close"), ("lifecycle", "end")):
            return "Run.close"
        if module in _SAMESTEP_CALLS:
            return _SAMESTEP_CALLS[module]
    first = next((frame for frame in frames if is_samestep(frame) or is_user_code(frame)), None)
    is_own = first is not None and is_samestep(first) and PurePath(first.file).parent.name == "distributed"
    return _INSIDE_SAMESTEP if is_own else ""


def _purpose(stack: Sequence[Frame], name: str) -> str:
    """What DDP, FSDP or a layer calls a collective for; empty if the script calls it, also below such a module."""
    frames = list(takewhile(lambda frame: not is_user_code(frame), stack))
    if any("/torch/distributed/fsdp/" in frame.file for frame in frames):
        return "FSDP parameters" if name == "all_gather" else "FSDP gradients"
    if any(frame.file.endswith("/torch/nn/modules/_functions.py") for frame in frames):
        return "SyncBatchNorm"
    ddp = [frame.function for frame in frames if frame.file.endswith("/torch/nn/parallel/distributed.py")]
    if ddp:
        return "DDP, at its start" if "__init__" in ddp else "DDP buffers"
    return "DDP gradients" if name == "all_reduce" and in_backward(frames) else ""


def in_backward(stack: Sequence[Frame]) -> bool:
    """Whether a thread runs a backward pass."""
    return any(frame.function == "_engine_run_backward" for frame in stack)


def _python_name(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed that was called, such as all_gather_object; empty if there is none."""
    functions = [
        frame.function
        for frame in frames
        if frame.file.endswith("/torch/distributed/distributed_c10d.py") and not frame.function.startswith("_")
    ]
    return functions[-1] if functions else ""


@dataclass(frozen=True)
class Divergence:
    """The first collective of a group in which ranks differ."""

    number: int
    calls: list[dict[int, Collective]]  # by rank; ranks that called the same are together, the most ranks first

    @property
    def is_tie(self) -> bool:
        """Whether no group of ranks is larger than the others, so that none of them is the suspect."""
        return len(self.calls[0]) == len(self.calls[1])

    @property
    def suspects(self) -> list[int]:
        """The ranks that differ from most others; in a tie, all of them."""
        return sorted(rank for calls in (self.calls if self.is_tie else self.calls[1:]) for rank in calls)

    @property
    def differs_in_size_only(self) -> bool:
        """Whether all ranks called the same collective on the same line, with other shapes or dtypes."""
        calls = [call for group in self.calls for call in group.values()]
        return len({(operation(call), user_frame(call.stack)) for call in calls}) == 1


class WaitGraph:
    """The known ranks, the collective that each of them waits in, and the ranks that it waits for."""

    def __init__(self, evidence: Sequence[RankEvidence], world_size: int | None = None) -> None:
        self.known: Mapping[int, RankEvidence] = {each.rank: each for each in evidence}
        self.size = max([world_size or 0, *(rank + 1 for rank in self.known)])
        self._world_size = world_size
        self.pending = {
            rank: pending
            for rank, each in self.known.items()
            if not self.has_ended(rank) and (pending := current_collective(each)) is not None
        }
        self._members_by_name = dict[tuple[str, str], set[tuple[int, ...]]]()
        for call in self._calls():
            if call.ranks:
                known = self._members_by_name.setdefault((call.backend, call.group), set())
                known.add(tuple(sorted(call.ranks)))

    def _calls(self) -> Iterator[Collective]:
        return chain.from_iterable(each.collectives or () for each in self.known.values())

    def key(self, call: Collective) -> GroupKey:
        """The group of a collective. A rank that has destroyed the group does not know its members any more."""
        members = tuple(sorted(call.ranks))
        known = self._members_by_name.get((call.backend, call.group), set())
        if not members and len(known) == 1:
            members = next(iter(known))
        return call.backend, call.group, members

    @cached_property
    def history(self) -> dict[GroupKey, dict[int, dict[int, Collective]]]:
        """By group and number, what each rank has called; without point-to-point calls."""
        found = dict[GroupKey, dict[int, dict[int, Collective]]]()
        for rank, each in self.known.items():
            for call in each.collectives or ():
                if not call.is_p2p and not is_unrecorded(call):
                    found.setdefault(self.key(call), {}).setdefault(call.number, {})[rank] = call
        return found

    @cached_property
    def last_numbers(self) -> dict[GroupKey, dict[int, int]]:
        """By group, the number of the last collective that each rank has called, as far as it is recorded."""
        return {
            key: {rank: number for number in sorted(by_number) for rank in by_number[number]}
            for key, by_number in self.history.items()
        }

    @cached_property
    def edges(self) -> dict[int, set[int]]:
        """For each rank that waits, the ranks that have not called its collective."""
        found, by_call = dict[int, set[int]](), dict[object, set[int]]()
        for rank, call in self.pending.items():
            if call.is_p2p:
                found[rank] = self._missing_peers(rank, call)
            else:
                what = self.key(call), call.number, call.name
                missing = by_call.setdefault(what, self._missing(call) if what not in by_call else set())
                found[rank] = missing - {rank}
        return found

    def roots(self) -> list[int]:
        """The ranks that others wait for and that wait for no rank themselves, at the ends of all chains."""
        waited_for = set[int]().union(*self.edges.values())
        return sorted(rank for rank in waited_for if not self.edges.get(rank))

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a known rank is over."""
        each = self.known.get(rank)
        return each is not None and (each.exit_code is not None or each.process.state in ("zombie", "gone"))

    def has_called(self, rank: int, call: Collective) -> bool:
        """Whether a known rank has called a collective that has a number; True if it does not answer."""
        return self.known[rank].collectives is None or (
            self.last_numbers.get(self.key(call), {}).get(rank, 0) >= call.number
        )

    def is_started(self, rank: int) -> bool:
        """Whether a launcher has started a member of a group, rather than, for example, a rank that calls mp.spawn."""
        return rank in self.known or self._world_size is None or rank < self._world_size

    def _missing(self, call: Collective) -> set[int]:
        members = self.members(call)
        if is_unrecorded(call):
            there = {rank for rank, other in self.pending.items() if is_unrecorded(other) and other.name == call.name}
            return self._without_ended(members - there)
        last = self.last_numbers[self.key(call)]
        return {rank for rank in members if self.has_ended(rank) or last.get(rank, 0) < call.number}

    def _without_ended(self, missing: set[int]) -> set[int]:
        """Of ranks that may not be members, the live ones and those that failed; all if no live one is elsewhere."""
        live = {rank for rank in missing if not self.has_ended(rank)}
        failed = {rank for rank in missing - live if self.known[rank].exit_code}
        return live | failed if live - self.pending.keys() else missing

    def _missing_peers(self, rank: int, call: Collective) -> set[int]:
        """The rank at the other end of a send or a receive, unless it is there; if it is not known, all such ranks."""
        others = self.members(call) - {rank}
        numbers = [int(end) for pair in _PEER.findall(call.name) for end in pair]  # as ranks of the group
        ends = {call.ranks[end] if end < len(call.ranks) else end for end in numbers} & others or others
        return {end for end in ends if not self._completes(call, self.pending.get(end))}

    def _completes(self, call: Collective, other: Collective | None) -> bool:
        return other is not None and other.is_p2p and ("send" in call.name) != ("send" in other.name)

    def members(self, call: Collective) -> set[int]:
        """The ranks of the group; if they are not recorded, those that have called a collective of it, or all."""
        key = self.key(call)
        if key[2]:
            return set(key[2])
        seen = {rank for calls in self.history.get(key, {}).values() for rank in calls}
        return seen if len(seen) > 1 and call.group not in _DEFAULT_GROUPS else set(range(self.size))

    def order_of_suspicion(self, rank: int) -> tuple[bool, int]:
        """A sort key of ranks that wait for each other, the most likely cause first.

        This is a rank that waits in a call which its script makes itself, in a group in which few ranks have called a
        collective. All ranks call the collectives of DDP, FSDP and samestep in each step.
        """
        call = self.pending[rank]
        callers = self.last_numbers.get(self.key(call), {})
        return not is_called_by_script(call, main_stack(self.known[rank])), len(callers)

    def lateness(self, rank: int) -> tuple[float, int]:
        """How many seconds after the earliest rank this one called collectives on average, and of how many."""
        shared = [
            by_rank[rank].called - min(call.called for call in by_rank.values())
            for by_number in self.history.values()
            for by_rank in by_number.values()
            if rank in by_rank and len(by_rank) > 1
        ]
        return (sum(shared) / len(shared), len(shared)) if shared else (0.0, 0)

    def divergence(self) -> Divergence | None:
        """The first collective, by time, in which ranks of a group called different ones; None if there is none."""
        found = filter(None, (self._divergence(calls) for calls in self.history.values()))
        return min(
            found, key=lambda each: max(call.called for calls in each.calls for call in calls.values()), default=None
        )

    def _divergence(self, by_number: Mapping[int, Mapping[int, Collective]]) -> Divergence | None:
        for number in sorted(by_number):
            by_rank = by_number[number]
            is_pending = any(call.is_pending for call in by_rank.values())
            kinds = dict[object, dict[int, Collective]]()
            for rank in sorted(by_rank):
                kinds.setdefault(_signature(by_rank[rank], is_pending), {})[rank] = by_rank[rank]
            if len(kinds) > 1:
                return Divergence(number, sorted(kinds.values(), key=len, reverse=True))
        return None


def _signature(call: Collective, is_pending: bool) -> tuple[object, ...]:
    name = operation(call)
    if name in _SAME_SIZE or (is_pending and name in _SAME_SIZE_IF_PENDING):
        return name, elements(call), tuple(call.dtypes)
    return (name,)


def pending_collectives(evidence: RankEvidence) -> list[Collective]:
    """The collectives that a rank has called and that are not complete, the oldest first."""
    return sorted((call for call in evidence.collectives or () if call.is_pending), key=lambda call: call.called)


def current_collective(evidence: RankEvidence) -> Collective | None:
    """The pending collective that the main thread waits in; if none matches its line, the oldest one.

    An older one may have been called without waiting for it (`async_op=True`).
    """
    pending, main = pending_collectives(evidence), main_stack(evidence)
    recorded = [call for call in pending if not is_unrecorded(call)]
    if not recorded:
        return _unrecorded_call(main, evidence, pending)
    return next((call for call in recorded if _is_in(call, main)), recorded[0])


def _unrecorded_call(main: Sequence[Frame], evidence: RankEvidence, pending: Sequence[Collective]) -> Collective | None:
    """A call that the flight recorder does not show, as a collective without group and number."""
    inside = takewhile(lambda frame: not is_user_code(frame), pending[0].stack if pending else main)
    names = (
        name
        for frame, (end, functions, name) in product(inside, _UNRECORDED)
        if frame.file.endswith(end) and frame.function in functions
    )
    name = next(names, "")
    if pending:
        return replace(pending[0], name=name or pending[0].name)
    called = max((call.called for call in evidence.collectives or ()), default=evidence.collected)
    return Collective("", 0, name, [], [], called, True, 0.0, stack=list(main)) if name else None


def main_stack(evidence: RankEvidence) -> list[Frame]:
    """The stack of the main thread; empty if it is not known."""
    return list(evidence.process.stacks.get("main", ()))


def waits_for_collective(evidence: RankEvidence, source: str) -> bool:
    """Whether the main thread seems to wait in a pending collective, rather than to do something else meanwhile.

    `source` is the text of the line of user code that it is on: a line such as `loss.item()` waits for the GPU.
    """
    main = main_stack(evidence)
    if not main or not is_user_code(main[0]):
        return True
    return any(_is_in(call, main) for call in pending_collectives(evidence)) or bool(_SYNCHRONIZES.search(source))


def _is_in(call: Collective, main: Sequence[Frame]) -> bool:
    if not call.stack:
        return in_backward(main)
    return bool(main) and user_frame(call.stack) == user_frame(main)


def format_ranks(ranks: Iterable[int], shown: int = 4) -> str:
    """Ranks in a sentence.

    >>> format_ranks([3]), format_ranks([0, 1]), format_ranks([0, 2, 5]), format_ranks(range(7))
    ('rank 3', 'ranks 0 and 1', 'ranks 0, 2 and 5', '7 ranks')
    """
    numbers = sorted(ranks)
    if len(numbers) > shown:
        return f"{len(numbers)} ranks"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
