"""Each cause of a hang is recognized from the evidence of the ranks: kind, culprits, and the exact text."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest

from samestep import Run
from samestep.cli.main import samestep
from samestep.distributed.rank_status import StatusBoard
from samestep.hang import hang_cause
from samestep.hang.evidence import Frame, ProcessInfo, RankEvidence
from samestep.hang.hang_cause import REMEDIES, find_cause, is_still_missing
from samestep.hang.hang_report import format_summary
from samestep.hang.wait_graph import describe_call, format_ranks
from samestep.training.lifecycle import Lifecycle
from tests.hang import simulated_ranks as sim
from tests.hang.simulated_ranks import at, barrier, c10d, call, done, line, others, rank, worker

BEFORE = done(call(39, seconds=42.4))
WAITS = (BEFORE, call(40))
ALL_BUT_1 = [0, 2, 3, 4, 5, 6, 7]
GRADIENTS = "all_reduce #40 (DDP gradients, 264,970 elements), called from /job/train.py:5: loss.backward()"
IN_BACKWARD, IN_BACKWARD_0 = f"7 ranks wait in {GRADIENTS}", f"rank 0 (node gpu-07, pid 4000) waits in {GRADIENTS}"
LONE = call(3, c10d("all_reduce", 10), group="1", shape=(1,))
HOLDS_UP = "rank 1 is holding up the other 7 ranks for 42 s."
RANK_1 = "rank 1 (node gpu-07, pid 4001)"


@pytest.fixture(autouse=True)
def sources():
    sim.add_sources()
    yield
    sim.remove_sources()


@dataclass(frozen=True)
class Case:
    """What the ranks do, and what is found."""

    name: str
    evidence: list[RankEvidence]
    kind: str
    culprits: list[int]
    text: list[str]  # the headline, then the sentences
    earlier: list[RankEvidence] | None = None
    world_size: int | None = None


def rank_1(*collectives, **options) -> list[RankEvidence]:
    """Rank 1 of 8; the others wait for the gradients #40."""
    return [*others(ALL_BUT_1, *WAITS), rank(1, *collectives, **options)]


IDLE_WORKER, READING_WORKER = worker(4500, sim.WAITS_FOR_WORK), worker(4501, sim.READS_SAMPLE)
IN_LOADER = f"{RANK_1} has not called it; it is waiting for its DataLoader, at /job/train.py:3: for batch in loader:"
LAST_39 = "its last collective was #39, 42 s ago; its process sleeps"

UNRECORDED = replace(
    call(0, [sim.torch_frame("distributed/distributed_c10d.py", "_store_based_barrier"), *at(2)], group="", dtype=""),
    shapes=[],
)

SAMESTEP = Path(hang_cause.__file__).parent.parent


def own(module: str, function: str) -> Frame:
    """A line of samestep."""
    return Frame(str(SAMESTEP / module), 1, function)


SAMESTEP_BARRIER = call(40, [*c10d("all_gather", 8)[:2], own("distributed/collectives.py", "barrier"), *at(8)])
LEAVES = [own("training/lifecycle.py", "leave"), own("training/run.py", "__exit__"), *at(16)]
RECEIVES_OVER_GLOO = replace(call(0, c10d("recv", 11), "recv", dtype="", group=""), is_p2p=True)

SPAWNED = [call(number, c10d("all_reduce", 10), pending=number == 4, ranks=[0, 1]) for number in (3, 4)]
IN_SPAWN = [sim.torch_frame("multiprocessing/spawn.py", "join"), *at(2)]
CHILD = ProcessInfo(4600, "sleeping", stacks={"main": c10d("all_reduce", 10)})
TRACKER = ProcessInfo(4602, "sleeping", stacks={"main": [Frame("<string>", 1, "<module>")]})
SHUTDOWN = [Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown")]
RAISED = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "/job/train.py", line 4, in main',
    "[rank1]:     loss = model(batch).mean()",
    "[rank1]: ValueError: bad sample",
]

CASES = [
    Case(
        "a rank sleeps",
        rank_1(BEFORE, stack=at(9)),
        "elsewhere",
        [1],
        [HOLDS_UP, IN_BACKWARD, f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)", LAST_39],
    ),
    Case(
        "a rank computes",
        rank_1(BEFORE, stack=at(9), state="running", cpu=1.0, gpu_percent=0.0),
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            "its last collective was #39, 42 s ago; its process runs at 100 % CPU, its GPU is at 0 %",
        ],
    ),
    Case(
        "a rank waits for a disk and is swapping",
        rank_1(BEFORE, stack=at(9), state="disk", swapping=True),
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            "its last collective was #39, 42 s ago; its process is in uninterruptible sleep (a disk, a network drive "
            "or a driver) and is swapping",
        ],
    ),
    Case(
        "a rank holds the GIL",
        rank_1(stack=at(9), answers=False, state="running", cpu=1.0),
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} does not answer: a thread of it may hold the GIL; it is at /job/train.py:9: time.sleep(120)",
            "its process runs at 100 % CPU",
        ],
    ),
    Case(
        "a debugger was left in",
        rank_1(BEFORE, stack=[Frame("/usr/lib/python3.11/bdb.py", 90, "trace_dispatch"), *at(14)]),
        "debugger",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is in a debugger that waits for input, at /job/train.py:12: breakpoint()",
            LAST_39,
        ],
    ),
    Case(
        "rank 0 waits for input",
        [rank(0, BEFORE, stack=at(20)), *others([1], *WAITS)],
        "elsewhere",
        [0],
        [
            "rank 0 is holding up rank 1 for 42 s.",
            f"rank 1 waits in {GRADIENTS}",
            "rank 0 (node gpu-07, pid 4000) has not called it; it is waiting for input, at /job/train.py:20: "
            'name = input("name of this run? ")',
            LAST_39,
        ],
    ),
    Case(
        "a data worker hangs",
        rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[IDLE_WORKER, READING_WORKER]),
        "data_worker",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            IN_LOADER,
            LAST_39,
            "its data worker (pid 4501) is at /job/dataset.py:3: return read(self.files[index])",
        ],
    ),
    Case(
        "a data worker died",
        rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[IDLE_WORKER, worker(4502, state="zombie")]),
        "data_worker_died",
        [1],
        [HOLDS_UP, IN_BACKWARD, IN_LOADER, LAST_39, "its data worker (pid 4502) has died"],
    ),
    Case(
        "a stopped process",
        rank_1(stack=sim.BACKWARD, state="stopped", answers=False),
        "stopped",
        [1],
        [HOLDS_UP, IN_BACKWARD, f"{RANK_1} is stopped by a signal, at /job/train.py:5: loss.backward()"],
    ),
    Case(
        "a rank ended with exit code 0",
        rank_1(answers=False, exit_code=0, state="gone", last_lines=["saved", "done"]),
        "ended",
        [1],
        [
            "rank 1 has ended, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has ended with exit code 0",
            "its log ends with: saved",
            "its log ends with: done",
        ],
    ),
    Case(
        "a rank was killed for memory",
        rank_1(answers=False, exit_code=-9, state="gone", oom_kills=1),
        "out_of_memory",
        [1],
        [
            "rank 1 has ended, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has ended by signal 9: the kernel killed it because memory was full",
        ],
    ),
    Case(
        "a full disk",
        rank_1(BEFORE, stack=at(9), full_disk="/scratch"),
        "full_disk",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            LAST_39,
            "the file system /scratch is full",
        ],
    ),
    Case(
        "a rank calls another collective",
        rank_1(BEFORE, call(40, c10d("all_reduce", 10), shape=(1,))),
        "different_collectives",
        [1],
        [
            "rank 1 is holding up the other 7 ranks for 42 s: they are in different collectives.",
            "7 ranks called all_reduce #40 (DDP gradients, 264,970 elements), at /job/train.py:5: loss.backward()",
            f"{RANK_1} called all_reduce #40 (1 element), at /job/train.py:10: dist.all_reduce(total)",
            "#40 is the first collective of this group in which they differ",
        ],
    ),
    Case(
        "other shapes",
        rank_1(BEFORE, call(40, shape=(12,), dtype="Half")),
        "different_shapes",
        [1],
        [
            "rank 1 is holding up the other 7 ranks for 42 s: the shapes or dtypes of one collective differ.",
            "7 ranks called all_reduce #40 with float32 [264970], at /job/train.py:5: loss.backward()",
            f"{RANK_1} called all_reduce #40 with float16 [12], at /job/train.py:5: loss.backward()",
        ],
    ),
    Case(
        "groups that wait for each other",
        rank_1(BEFORE, LONE),
        "different_collectives",
        [1],
        [
            "rank 1 is holding up the other 7 ranks for 42 s: they are in different collectives.",
            IN_BACKWARD,
            f"{RANK_1} waits in all_reduce #3 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            "these collectives are of different process groups, so each call waits for the other",
        ],
    ),
    Case(
        "a lone call of rank 1 next to the gradients of rank 0",
        [rank(0, *WAITS), rank(1, BEFORE, LONE)],
        "different_collectives",
        [1, 0],
        [
            "ranks 0 and 1 wait for each other for 42 s: they are in different collectives.",
            f"{RANK_1} waits in all_reduce #3 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            IN_BACKWARD_0,
            "these collectives are of different process groups, so each call waits for the other",
        ],
    ),
    Case(
        "a lone call of rank 0 next to the gradients of rank 1",
        [rank(0, BEFORE, LONE), rank(1, *WAITS)],
        "different_collectives",
        [0, 1],
        [
            "ranks 0 and 1 wait for each other for 42 s: they are in different collectives.",
            "rank 0 (node gpu-07, pid 4000) waits in all_reduce #3 (1 element), called from /job/train.py:10: "
            "dist.all_reduce(total)",
            f"{RANK_1} waits in {GRADIENTS}",
            "these collectives are of different process groups, so each call waits for the other",
        ],
    ),
    Case(
        "a lone call of rank 1 next to run.barrier of rank 0",
        [rank(0, BEFORE, SAMESTEP_BARRIER), rank(1, BEFORE, LONE)],
        "different_collectives",
        [1, 0],
        [
            "ranks 0 and 1 wait for each other for 42 s: they are in different collectives.",
            f"{RANK_1} waits in all_reduce #3 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            "rank 0 (node gpu-07, pid 4000) waits in run.barrier (all_reduce #40), called from /job/train.py:8: "
            "dist.barrier()",
            "these collectives are of different process groups, so each call waits for the other",
        ],
    ),
    Case(
        "two calls of the script, one in a group that only rank 1 has called",
        [rank(0, BEFORE, barrier(40)), rank(1, BEFORE, LONE)],
        "different_collectives",
        [1, 0],
        [
            "ranks 0 and 1 wait for each other for 42 s: they are in different collectives.",
            f"{RANK_1} waits in all_reduce #3 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            "rank 0 (node gpu-07, pid 4000) waits in barrier #40, called from /job/train.py:8: dist.barrier()",
            "these collectives are of different process groups, so each call waits for the other",
        ],
    ),
    Case(
        "two ranks in different collectives",
        [rank(0, *WAITS), rank(1, BEFORE, call(40, c10d("broadcast", 11), "broadcast", (1,)))],
        "different_collectives",
        [0, 1],
        [
            "ranks 0 and 1 wait for each other for 42 s: they are in different collectives.",
            "rank 0 (node gpu-07, pid 4000) called all_reduce #40 (DDP gradients, 264,970 elements), at "
            "/job/train.py:5: loss.backward()",
            f"{RANK_1} called broadcast #40 (1 element), at /job/train.py:11: dist.broadcast(flag, 0)",
            "#40 is the first collective of this group in which they differ",
        ],
    ),
    Case(
        "an interrupted network",
        [*others(range(4), *WAITS), *others(range(4, 8), *WAITS, node="gpu-08")],
        "network",
        [],
        [
            "all 8 ranks have waited for 42 s in the same collective, which does not complete: the network may be "
            "interrupted.",
            "8" + IN_BACKWARD[1:],
            "all 8 ranks have called it; it is not complete on ranks 0, 1, 2 and 3 on node gpu-07, "
            "ranks 4, 5, 6 and 7 on node gpu-08",
        ],
    ),
    Case(
        "a node is gone",
        others(range(4), *WAITS),
        "node_lost",
        [4, 5, 6, 7],
        [
            "ranks 4, 5, 6 and 7 are holding up the other 4 ranks for 42 s.",
            "ranks 0, 1, 2 and 3" + IN_BACKWARD[7:],
            "the launcher of ranks 4, 5, 6 and 7 does not answer: its node is down or unreachable",
        ],
        world_size=8,
    ),
    Case(
        "work on rank 0 only",
        [rank(0, BEFORE, stack=at(7)), *others(range(1, 8), BEFORE, barrier(40))],
        "rank_0_only",
        [0],
        [
            "rank 0 is holding up the other 7 ranks for 42 s.",
            "7 ranks wait in barrier #40, called from /job/train.py:8: dist.barrier()",
            "rank 0 (node gpu-07, pid 4000) has not called it; it is at /job/train.py:7: evaluate(model)",
            LAST_39,
        ],
    ),
    Case(
        "a slow rank",
        [
            *others(ALL_BUT_1, *WAITS, step_seconds=0.4),
            rank(1, BEFORE, stack=at(9), step_seconds=2.1, state="running", cpu=1.0),
        ],
        "slow",
        [1],
        [
            "rank 1 is slow, not stuck: the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            "its last collective was #39, 42 s ago; its process runs at 100 % CPU",
            "rank 1 needs 2.10 s per step, the others 400 ms",
        ],
        earlier=rank_1(done(call(38)), stack=at(9)),
    ),
    Case(
        "a stopped data worker",
        rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[READING_WORKER, worker(4502, state="stopped")]),
        "stopped",
        [1],
        [HOLDS_UP, IN_BACKWARD, IN_LOADER, "its data worker (pid 4502) is stopped by a signal"],
    ),
    Case(
        "a data worker was killed for memory",
        rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[worker(4502, state="zombie", exit_code=-9)], oom_kills=1),
        "out_of_memory",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            IN_LOADER,
            LAST_39,
            "its data worker (pid 4502) has died: the kernel killed it because memory was full",
        ],
    ),
    Case(
        "a dataset without workers blocks",
        rank_1(BEFORE, stack=[*sim.READS_SAMPLE[:2], *sim.WAITS_FOR_LOADER[2:]]),
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is reading a sample of its dataset, at /job/dataset.py:3: "
            "return read(self.files[index])",
            LAST_39,
        ],
    ),
    Case(
        "a stopped process inside of the collective",
        rank_1(*WAITS, state="stopped"),
        "stopped",
        [1],
        [HOLDS_UP, IN_BACKWARD, f"{RANK_1} is stopped by a signal, at /job/train.py:5: loss.backward()"],
    ),
    Case(
        "a rank never reached init_process_group",
        [*others(ALL_BUT_1, replace(UNRECORDED, name="_store_based_barrier")), rank(1, stack=at(9))],
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            "7 ranks wait in init_process_group, called from /job/train.py:2: def main(rank):",
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            "it has called no collective yet; its process sleeps",
        ],
    ),
    Case(
        "two nodes of which one has completed the collective",
        [
            *others(range(4), BEFORE, done(call(40)), call(41, seconds=41.0)),
            *others(range(4, 8), *WAITS, node="gpu-08"),
        ],
        "network",
        [],
        [
            "all 8 ranks have waited for 42 s: a collective that all ranks have called does not complete, the network "
            "may be interrupted.",
            "ranks 4, 5, 6 and 7" + IN_BACKWARD[7:],
            "all 8 ranks have called it; it is not complete on ranks 4, 5, 6 and 7 on node gpu-08",
        ],
    ),
    Case(
        "a hybrid mesh",
        [  # shards are exchanged in groups of two ranks, then gradients between the groups
            rank(0, call(7, group="a", ranks=[0, 1])),
            rank(1, call(9, c10d("all_reduce", 10), group="c", ranks=[1, 3], shape=(1,), seconds=40.0)),
            rank(2, call(7, group="b", ranks=[2, 3], seconds=41.0)),
            rank(3, done(call(6, group="b", ranks=[2, 3], seconds=50.0)), stack=at(9)),
        ],
        "elsewhere",
        [3],
        [
            "rank 3 is holding up the other 3 ranks for 42 s.",
            "rank 1 waits in all_reduce #9 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            "2 more ranks wait because of this",
            "rank 3 (node gpu-07, pid 4003) has not called it; it is at /job/train.py:9: time.sleep(120)",
            "its last collective was all_reduce #6 (DDP gradients, 264,970 elements) of another process group, 50 s "
            "ago; its process sleeps",
        ],
    ),
    Case(
        "a rank leaves its run",
        rank_1(BEFORE, stack=[own("distributed/rank_status.py", "exit"), *LEAVES]),
        "leaving",
        [1],
        [
            "rank 1 is leaving its run, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has not called it; it has called sys.exit and is leaving its run, which begins at "
            "/job/train.py:16: with Run() as run:",
            LAST_39,
        ],
    ),
    Case(
        "a rank waits at the end of its run",
        rank_1(
            BEFORE,
            call(
                7,
                [*c10d("all_gather", 16)[:2], own("distributed/communicator.py", "close"), *LEAVES],
                "all_gather",
                group="1",
                seconds=30.0,
            ),
        ),
        "leaving",
        [1],
        [
            "rank 1 is leaving its run, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has not called it; it is leaving its run, which begins at /job/train.py:16: with Run() as run:",
            "its last collective was Run.close (all_gather #7) of another process group, 30 s ago; its process sleeps",
        ],
    ),
    Case(
        "ranks that wait at the end of their run",
        [
            *others([0, 2], BEFORE, call(40, [own("distributed/communicator.py", "close"), *LEAVES], "all_gather")),
            rank(1, BEFORE, stack=at(9)),
        ],
        "elsewhere",
        [1],
        [
            "rank 1 is holding up the other 2 ranks for 42 s.",
            "ranks 0 and 2 wait in Run.close (all_gather #40) at the end of their run, which begins at "
            "/job/train.py:16: with Run() as run:",
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            LAST_39,
        ],
    ),
    Case(
        "two ranks that receive over gloo",
        [rank(number, RECEIVES_OVER_GLOO) for number in (0, 1)],
        "send_receive",
        [0, 1],
        [
            "ranks 0 and 1 wait for each other for 42 s: both wait to receive, and none sends.",
            "ranks 0 and 1 wait in recv, called from /job/train.py:11: dist.broadcast(flag, 0)",
        ],
    ),
    Case(
        "a rank that called the collective alone",
        [rank(0, BEFORE, call(40, c10d("all_reduce", 10), shape=(1,))), *others([1, 2, 3], BEFORE, stack=at(9))],
        "elsewhere",
        [1, 2, 3],
        [
            "ranks 1, 2 and 3 are holding up rank 0 for 42 s.",
            "rank 0 waits in all_reduce #40 (1 element), called from /job/train.py:10: dist.all_reduce(total)",
            f"{RANK_1} has not called it; it is at /job/train.py:9: time.sleep(120)",
            LAST_39,
            "ranks 2 and 3 are not there either; rank 2 is at /job/train.py:9: time.sleep(120)",
            "rank 0 alone has called it: is its line under a condition, such as `if rank == 0`?",
        ],
    ),
    Case(
        "a rank that does something else while its own collective is pending",
        [
            rank(0, call(3, c10d("all_reduce", 10), group="1", seconds=20.0), stack=at(9)),
            rank(1, call(40)),
        ],
        "elsewhere",
        [0],
        [
            "rank 0 is holding up rank 1 for 42 s.",
            "rank 1" + IN_BACKWARD[7:].replace("wait", "waits", 1),
            "rank 0 (node gpu-07, pid 4000) has called another one and does not wait for it; it is at "
            "/job/train.py:9: time.sleep(120)",
            "its last collective was all_reduce #3 (264,970 elements) of another process group, 20 s ago; its process "
            "sleeps",
        ],
    ),
    Case(
        "a child process of a rank holds up another child",
        [
            rank(
                0, *SPAWNED, stack=IN_SPAWN, children=[CHILD, replace(CHILD, pid=4601, stacks={"main": at(9)}), TRACKER]
            )
        ],
        "other_process",
        [],
        [
            "a process that samestep run did not start is holding up rank 0 for 42 s.",
            "rank 0 waits in all_reduce #4 (264,970 elements), called from /job/train.py:10: dist.all_reduce(total)",
            "a process that rank 0 started (pid 4601) is at /job/train.py:9: time.sleep(120)",
        ],
        world_size=1,
    ),
    Case(
        "a group has members that the launcher did not start",
        [rank(0, replace(SPAWNED[1], ranks=[0, 1, 2]))],
        "other_process",
        [],
        [
            "2 processes that samestep run did not start are holding up rank 0 for 42 s.",
            "rank 0 waits in all_reduce #4 (264,970 elements), called from /job/train.py:10: dist.all_reduce(total)",
            "the group has members that samestep run did not start, and whose lines it does not know",
        ],
        world_size=1,
    ),
    Case(
        "a rank has raised and takes long to end",
        rank_1(answers=False, state="running", last_lines=RAISED),
        "elsewhere",
        [1],
        [
            HOLDS_UP,
            IN_BACKWARD,
            f"{RANK_1} raised ValueError: bad sample, at /job/train.py:4: loss = model(batch).mean()",
            "its process runs, and has not ended yet",
        ],
    ),
    Case(
        "a rank has raised and a thread keeps its process",
        rank_1(BEFORE, stack=SHUTDOWN, threads={"Thread-1 (read) 0x7ff4f19116c0": at(9)}, last_lines=RAISED),
        "thread",
        [1],
        [
            "rank 1 has ended its script, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} raised ValueError: bad sample, at /job/train.py:4: loss = model(batch).mean()",
            "its process does not end because thread Thread-1 (read) still runs, at /job/train.py:9: time.sleep(120)",
        ],
    ),
    Case(
        "a rank has ended its script and a thread keeps its process",
        rank_1(BEFORE, stack=SHUTDOWN, threads={"Thread-1 (sleep)": SHUTDOWN[-1:]}, last_lines=["done"]),
        "thread",
        [1],
        [
            "rank 1 has ended its script, and the other 7 ranks have waited for 42 s.",
            IN_BACKWARD,
            f"{RANK_1} has ended its script and waits for thread Thread-1 (sleep)",
        ],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_cause_is_found_and_named(case):
    cause = find_cause(case.evidence, case.earlier, case.world_size)
    assert cause is not None
    assert (cause.kind, cause.culprits) == (case.kind, case.culprits)
    first, *sentences = case.text
    if case.kind in ("elsewhere", "rank_0_only", "data_worker"):
        waits = "the ranks wait" if len(cause.waiting) > 1 else f"rank {cause.waiting[0]} waits"
        sentences.append(f"{format_ranks(case.culprits)} may still arrive: {waits} for up to 10 min")
    expected = [f"samestep: {first}", *(f"  {text}" for text in sentences), f"  what to do: {REMEDIES[case.kind]}"]
    assert format_summary(cause).splitlines() == expected
    assert cause.seconds == 42
    assert not set(cause.waiting) & set(cause.culprits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_cause_has_plain_json_values(case):
    cause = find_cause(case.evidence, case.earlier, case.world_size)
    assert cause is not None
    value = cause.to_json()
    assert json.loads(json.dumps(value)) == value
    assert (value["kind"], value["remedy"]) == (case.kind, REMEDIES[case.kind])


@pytest.mark.parametrize(
    ("child", "before", "kind"),
    [
        pytest.param(worker(4502, state="zombie", name="ffmpeg"), None, "elsewhere", id="another-program"),
        pytest.param(worker(4502, state="stopped", name="ffmpeg"), None, "elsewhere", id="stopped-program"),
        pytest.param(worker(4502, state="zombie", exit_code=0), None, "elsewhere", id="no-more-batches"),
        pytest.param(worker(4502, state="gone"), None, "elsewhere", id="collected"),
        pytest.param(worker(4502, state="zombie", parent=4500), None, "elsewhere", id="child-of-a-worker"),
        pytest.param(worker(4502, state="zombie", parent=4001), None, "data_worker_died", id="by-its-name"),
        pytest.param(
            worker(4502, state="zombie", name="python"), worker(4502, sim.WAITS_FOR_WORK, name="python"),
            "data_worker_died", id="by-its-stack-before",
        ),
        pytest.param(
            worker(4502, state="stopped", name="python"), worker(4502, sim.WAITS_FOR_WORK, name="python"),
            "stopped", id="stopped-by-its-stack-before",
        ),
    ],
)  # fmt: skip
def test_only_a_data_worker_that_has_failed_explains_that_a_rank_waits_for_its_loader(child, before, kind):
    now = rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[IDLE_WORKER, child])
    earlier = None if before is None else rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[IDLE_WORKER, before])
    cause = find_cause(now, earlier)
    assert cause is not None
    assert (cause.kind, cause.culprits) == (kind, [1])


def test_a_data_worker_that_failed_was_not_killed_for_memory():
    died = worker(4502, state="zombie", exit_code=1)
    cause = find_cause(rank_1(BEFORE, stack=sim.WAITS_FOR_LOADER, children=[died], oom_kills=1))
    assert cause is not None
    assert (cause.kind, cause.sentences[-1].text) == ("data_worker_died", "its data worker (pid 4502) has died")


def test_ranks_that_leave_their_run_in_the_same_group_are_named():
    closes = call(40, [own("distributed/communicator.py", "close"), *LEAVES], "all_gather")
    cause = find_cause([*others([0, 2], *WAITS), rank(1, BEFORE, closes)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("leaving", [1])


def test_a_difference_before_the_end_of_the_run_is_the_cause():
    first = done(call(39, c10d("broadcast", 11), "broadcast", (1,)))
    closes = call(40, [own("distributed/communicator.py", "close"), *LEAVES], "all_gather")
    cause = find_cause([*others([0, 2], *WAITS), rank(1, first, closes)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("different_collectives", [1])


def test_the_end_of_a_run_is_recognized_by_functions_that_exist():
    for function, file in (
        (Run.__exit__, "training/run.py"),
        (Lifecycle.fail, "training/lifecycle.py"),
        (Lifecycle._inform_peers, "training/lifecycle.py"),
        (Lifecycle.end, "training/lifecycle.py"),
        (StatusBoard.exit, "distributed/rank_status.py"),
    ):
        assert function.__code__.co_filename == str(SAMESTEP / file)


def test_the_commands_in_remedies_exist():
    commands = [text for remedy in REMEDIES.values() for text in re.findall("`samestep ([^`]+)`", remedy)]
    assert len(commands) >= 2
    for name, *arguments in map(str.split, commands):
        command = samestep.get_command(click.Context(samestep), name)
        assert command is not None, name
        command.make_context(name, arguments)  # raises click.UsageError if an option does not exist


def test_every_remedy_is_for_a_cause_that_is_found():
    assert {case.kind for case in CASES} == REMEDIES.keys()


@pytest.mark.parametrize(
    ("evidence", "earlier"),
    [
        pytest.param([rank(0, stack=at(9), state="running", cpu=1.0)], None, id="one-rank-computes"),
        pytest.param(others(range(4), BEFORE, stack=at(9)), None, id="no-rank-waits"),
        pytest.param([], None, id="nothing-is-known"),
        pytest.param(
            rank_1(BEFORE, stack=at(9)),
            [*others([0, *range(2, 8)], done(call(38)), call(39)), rank(1, done(call(38)), call(39))],
            id="all-progress-and-none-was-waited-for-before",
        ),
        pytest.param(others(range(4), call(40)), others(range(4), call(39)), id="all-are-in-the-next-collective"),
        pytest.param(
            [rank(0, exit_code=0, state="gone"), rank(1, stack=at(9))], None, id="a-rank-ended-and-none-waits"
        ),
    ],
)
def test_ranks_that_progress_do_not_hang(evidence, earlier):
    assert find_cause(evidence, earlier, world_size=len(evidence)) is None


def test_a_rank_that_others_wait_for_at_two_looks_and_that_progresses_is_slow():
    earlier = [*others(ALL_BUT_1, done(call(38)), call(39)), rank(1, done(call(38)), stack=at(9))]
    cause = find_cause(rank_1(BEFORE, stack=at(9)), earlier)
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("slow", [1])


def test_a_rank_that_is_elsewhere_at_both_looks_is_not_slow():
    now = rank_1(BEFORE, stack=at(9))
    cause = find_cause(now, now)
    assert cause is not None
    assert cause == find_cause(now)


def test_a_rank_that_runs_other_lines_than_before_is_not_stuck_at_its_line():
    cause = find_cause(rank_1(BEFORE, stack=at(9)), rank_1(BEFORE, stack=at(4)))
    assert cause is not None
    assert (
        "it is not stuck at this line: about a second before, it was at /job/train.py:4: loss = model(batch).mean()"
        in (format_summary(cause))
    )


def test_the_first_difference_is_the_cause_even_if_torch_completed_that_collective():
    """The source of a broadcast does not wait for the others."""
    first = [BEFORE, done(call(40, c10d("broadcast", 11), "broadcast", (1,))), call(41)]
    other = [BEFORE, call(40)]
    cause = find_cause([rank(0, *first), *others([1, 2, 3], *other)])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.waiting) == ("different_collectives", [0], [1, 2, 3])
    assert cause.sentences[-1].text == "#40 is the first collective of this group in which they differ"


def test_a_complete_all_gather_of_different_sizes_is_valid():
    """NCCL gathers tensors of different sizes."""
    gathers = [done(call(39, c10d("all_gather", 10), "nccl:all_gather", (size,))) for size in (3, 4)]
    cause = find_cause([rank(0, gathers[0], call(40)), rank(1, gathers[1], stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [1])


def test_gloo_and_nccl_count_their_collectives_by_themselves():
    """A group may have both backends: number 40 of one of them says nothing about the other."""
    nccl = call(40, name="nccl:all_reduce")
    gloo = done(call(40, c10d("barrier", 8), "barrier", dtype=""))
    cause = find_cause([rank(0, nccl), rank(1, gloo, done(call(39, name="nccl:all_reduce")), stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [1])


def test_a_rank_that_has_destroyed_a_group_has_called_its_collectives():
    member = call(40, group="g", ranks=[0, 1])
    evidence = [rank(0, member), rank(1, done(call(40, group="g")), stack=at(9))]
    cause = find_cause(evidence)
    assert cause is not None
    assert cause.kind == "network"


def test_the_line_of_the_main_thread_decides_between_pending_collectives():
    """samestep's metric sync is started without waiting for it."""
    started = call(3, c10d("all_gather", 13), "all_gather", (256,), group="1", seconds=60.0)
    cause = find_cause([rank(0, started, call(40)), rank(1, BEFORE, stack=at(9))])
    assert cause is not None
    assert cause.call == "all_reduce #40 (DDP gradients, 264,970 elements)"


def test_a_call_from_a_thread_of_c_is_named_by_the_main_thread():
    """On a GPU, autograd's own threads call DDP's all_reduce: the recorder has no Python stack."""
    waiting = rank(0, call(40, [], "nccl:all_reduce"), stack=sim.BACKWARD)
    cause = find_cause([waiting, rank(1, stack=at(9))])
    assert cause is not None
    assert format_summary(cause).splitlines()[1] == "  rank 0" + IN_BACKWARD[7:].replace("wait", "waits", 1)


def test_a_rank_whose_gpu_waits_may_be_at_a_later_line():
    cause = find_cause([rank(0, call(40, [], "nccl:all_reduce"), stack=at(14)), rank(1, stack=at(9))])
    assert cause is not None
    assert format_summary(cause).splitlines()[1] == (
        "  rank 0 waits in all_reduce #40 (DDP gradients, 264,970 elements); Python is at /job/train.py:14: "
        "value = loss.item()"
    )


def test_a_rank_without_any_stack():
    cause = find_cause([rank(0, call(40, [])), rank(1, BEFORE)])
    assert cause is not None
    assert format_summary(cause).splitlines()[1:3] == [
        "  rank 0 waits in all_reduce #40 (264,970 elements)",
        f"  {RANK_1} has not called it; it is at an unknown line",
    ]


def test_over_nccl_a_gpu_that_computes_looks_like_the_network():
    cause = find_cause(others([0, 1], call(40, name="nccl:all_reduce"), state="running", cpu=1.0))
    assert cause is not None
    assert cause.kind == "network"
    assert cause.sentences[-1].text == "over NCCL, a GPU that still computes what was called before looks the same"


def test_a_slow_transfer_keeps_processes_busy():
    cause = find_cause([rank(0, *WAITS, state="running", cpu=0.9), rank(1, *WAITS)])
    assert cause is not None
    assert cause.kind == "network"
    assert cause.sentences[-1].text == "rank 0 is busy, so this may be a slow transfer"


@pytest.mark.parametrize(
    ("number", "others_at", "kind"),
    [
        pytest.param(7, call(40), "rank_0_only", id="under-a-condition"),
        pytest.param(9, barrier(40), "rank_0_only", id="before-a-barrier"),
        pytest.param(9, SAMESTEP_BARRIER, "rank_0_only", id="before-a-barrier-of-samestep"),
        pytest.param(9, call(40), "elsewhere", id="anywhere"),
    ],
)
def test_work_of_rank_0_only(number, others_at, kind):
    cause = find_cause([rank(0, BEFORE, stack=at(number)), *others([1, 2], BEFORE, others_at)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == (kind, [0])


def test_another_rank_than_0_is_elsewhere_even_at_such_a_line():
    cause = find_cause(rank_1(BEFORE, stack=at(7)))
    assert cause is not None
    assert cause.kind == "elsewhere"


@pytest.mark.parametrize("file", ["lightning_utilities/core/rank_zero.py", "accelerate/state.py"])
def test_functions_that_only_rank_0_runs(file):
    stack = [line(4), Frame(f"{sim.PACKAGES}/{file}", 1, "wrapped"), *sim.OUTER]
    cause = find_cause([rank(0, BEFORE, stack=stack), rank(1, BEFORE, call(40))])
    assert cause is not None
    assert cause.kind == "rank_0_only"


def test_rank_0_runs_a_function_for_all_in_run_once():
    folder = SAMESTEP / "distributed"
    waits = [Frame(str(folder / "once.py"), 1, "_await"), *at(13)]
    runs = [line(9), Frame(str(folder / "once.py"), 1, "run_and_pickle"), *at(13)]
    ended = done(call(5, group="1", seconds=30.0))
    cause = find_cause([rank(0, ended, stack=runs), *others([1, 2], ended, stack=waits)])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.seconds) == ("rank_0_only", [0], 30)
    assert format_summary(cause).splitlines()[1:3] == [
        "  ranks 1 and 2 wait in run.once, called from /job/train.py:13: mean = run.mean(losses)",
        "  rank 0 (node gpu-07, pid 4000) runs it for the others; it is at /job/train.py:9: time.sleep(120)",
    ]


def receives(number: int, source: int) -> RankEvidence:
    name = f"nccl:recv {number}<-{source}"
    return rank(number, replace(call(1, c10d("recv", 11), name, (3,)), is_p2p=True))


def test_a_receive_waits_for_the_rank_at_the_other_end():
    cause = find_cause([receives(0, 1), rank(1, BEFORE, stack=at(9)), rank(2, BEFORE, stack=at(4))])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.call) == ("elsewhere", [1], "recv (3 elements)")


def test_two_ranks_that_receive_from_each_other():
    cause = find_cause([receives(0, 1), receives(1, 0)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("send_receive", [0, 1])


def test_ranks_that_receive_from_each_other_hold_up_the_others():
    cause = find_cause([receives(0, 1), receives(1, 0), *others([2, 3], *WAITS)])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.waiting) == ("send_receive", [0, 1], [2, 3])
    assert cause.headline == "ranks 0 and 1 wait for each other for 42 s: both wait to receive, and none sends."
    assert cause.sentences[-1].text == "2 more ranks wait because of this"


def test_a_chain_of_receives_over_gloo_ends_at_the_rank_that_is_elsewhere():
    cause = find_cause([*others([0, 1, 2], RECEIVES_OVER_GLOO), rank(3, BEFORE, stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [3])


def test_a_send_and_a_receive_over_gloo_may_be_of_other_ranks_or_tags():
    sends = replace(RECEIVES_OVER_GLOO, name="send", stack=c10d("send", 10))
    cause = find_cause([rank(0, RECEIVES_OVER_GLOO), rank(1, sends)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("send_receive", [0, 1])
    assert format_summary(cause).splitlines()[:3] == [
        "samestep: ranks 0 and 1 wait for each other for 42 s: their sends and receives do not match, or the network "
        "is interrupted.",
        "  rank 0 (node gpu-07, pid 4000) waits in recv, called from /job/train.py:11: dist.broadcast(flag, 0)",
        f"  {RANK_1} waits in send, called from /job/train.py:10: dist.all_reduce(total)",
    ]


def test_a_send_and_its_receive_that_do_not_complete():
    sends = rank(1, replace(call(1, c10d("send", 11), "nccl:send 1->0", (3,)), is_p2p=True))
    cause = find_cause([receives(0, 1), sends])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("network", [])
    assert cause.headline == (
        "both ranks have waited for 42 s: a send and its receive do not complete, the network may be interrupted."
    )
    assert [each.text.split(",")[0] for each in cause.sentences] == [
        "rank 0 (node gpu-07",
        "rank 1 (node gpu-07",
    ]


def test_the_ends_of_a_receive_are_ranks_of_its_group():
    receive = replace(call(1, c10d("recv", 11), "nccl:recv 0<-1", (3,), ranks=[2, 5]), is_p2p=True)
    cause = find_cause([rank(2, receive), rank(5, stack=at(9)), rank(1, stack=at(4))])
    assert cause is not None
    assert cause.culprits == [5]


def test_a_receive_over_gloo_names_the_ranks_that_do_not_wait():
    """gloo records neither the call nor the other end; the stack shows it."""
    receive = replace(call(0, c10d("recv", 11), "recv", dtype="", group=""), is_p2p=True)
    cause = find_cause([rank(0, receive), rank(1, call(40)), rank(2, BEFORE, stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [2])


def test_ranks_that_failed_because_they_waited_too_long_are_not_the_cause():
    victim = rank(0, answers=False, exit_code=1, state="gone", last_lines=[LOST[-1]])
    cause = find_cause([victim, *others([2, 3], *WAITS), rank(1, BEFORE, stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [1])
    cause = find_cause([victim, *others([1, 2], *WAITS)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("ended", [0]), "no better cause is known"


LOST = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 15, in <module>',
    '  File "/job/train.py", line 5, in main',
    f'  File "{sim.PACKAGES}/torch/_tensor.py", line 623, in backward',
    "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:7051: Connection reset by peer.",
]


def ended(number: int, code: int, lines: list[str]) -> RankEvidence:
    return rank(number, answers=False, exit_code=code, state="gone", last_lines=lines)


def test_ranks_that_lost_one_that_ended_with_exit_code_0():
    """gloo notices at once that a process is gone, so no rank waits."""
    cause = find_cause([ended(0, 1, LOST), ended(1, 0, ["saved", "", "done"]), ended(2, 1, LOST)])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.waiting, cause.seconds) == ("ended", [1], [0, 2], 0)
    assert format_summary(cause).splitlines() == [
        "samestep: rank 1 has ended before the others.",
        "  ranks 0 and 2 lost the connection to another rank, at /job/train.py:5: loss.backward()",
        f"  {RANK_1} has ended with exit code 0",
        "  its log ends with: saved",
        "  its log ends with: done",
        f"  what to do: {REMEDIES['ended']}",
    ]


UPLOAD = [*LOST[:3], "ConnectionResetError: [Errno 104] Connection reset by peer"]


def test_a_rank_that_lost_a_connection_of_its_own_is_left_to_the_failure_report():
    assert find_cause([ended(0, 1, UPLOAD), ended(1, 0, ["done"])]) is None
    cause = find_cause([ended(0, 1, UPLOAD), *others([1, 2], *WAITS), rank(3, BEFORE, stack=at(9))])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("ended", [0])


def test_gloo_ends_a_rank_that_receives_more_than_it_expects():
    message = [
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 560 vs 4. Received data size "
        "doesn't match expected size.",
        "Fatal Python error: Aborted",
        f'  File "{sim.PACKAGES}/torch/distributed/distributed_c10d.py", line 1 in all_reduce',
        '  File "/job/train.py", line 10 in main',
        '  File "/job/train.py", line 15 in <module>',
    ]
    cause = find_cause([ended(0, 1, LOST), ended(1, -6, message), ended(2, -15, [])])
    assert cause is not None
    assert (cause.kind, cause.culprits, cause.waiting) == ("different_collectives", [], [0])
    assert format_summary(cause).splitlines()[:4] == [
        "samestep: rank 1 has ended: the ranks called different collectives, or one with different shapes.",
        "  rank 0 (node gpu-07, pid 4000) lost the connection to another rank, at /job/train.py:5: loss.backward()",
        f"  {RANK_1} received more data than it expected, at /job/train.py:10: dist.all_reduce(total)",
        "  which rank made the wrong call is not known",
    ]
    waiting = find_cause([rank(0, *WAITS), ended(1, -6, message[:1])])
    assert waiting is not None
    assert (waiting.kind, waiting.culprits, waiting.waiting) == ("different_collectives", [], [0])
    assert [each.text for each in waiting.sentences] == [
        "rank 0 (node gpu-07, pid 4000) called all_reduce #40 with float32 [264970], at",
        f"{RANK_1} received more data than it expected",
        "which rank made the wrong call is not known",
    ]
    ending = [
        rank(0, answers=False, state="running", last_lines=LOST),
        rank(2, answers=False, stack=at(9)),
        rank(3, done(call(39))),
        rank(4, answers=False, last_lines=RAISED),
    ]
    cause = find_cause([*ending, ended(1, -6, message[:1])])
    assert cause is not None
    assert [each.text.partition(") ")[2] for each in cause.sentences[:3]] == [
        "lost the connection to another rank, at", "is at", "called all_reduce #39 with float32 [264970], at",
    ]  # fmt: skip


def test_a_rank_that_failed_by_itself_is_left_to_the_failure_report():
    assert find_cause([ended(0, 1, LOST), ended(1, 1, ["ValueError: x"])]) is None
    assert find_cause([ended(0, 0, ["done"]), ended(1, 0, ["done"])]) is None


def test_a_receive_that_no_rank_sends_to():
    receive = replace(call(0, c10d("recv", 11), "recv", dtype="", group=""), is_p2p=True)
    cause = find_cause([rank(0, receive), *others([1, 2], *WAITS)])
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("different_collectives", [0])


def test_a_slow_rank_is_shown_with_its_lateness():
    def look(number: int, late: float) -> list[RankEvidence]:
        history = [done(call(n, seconds=10.0 * (number - n))) for n in range(30, number)]
        slow = [replace(each, called=each.called + late) for each in history]
        return [rank(0, *history, call(number, seconds=0.2)), rank(1, *slow, stack=at(9))]

    cause = find_cause(look(41, 0.31), look(40, 0.31))
    assert cause is not None
    assert format_summary(cause).splitlines()[:1] == ["samestep: rank 1 is slow, not stuck: rank 0 must wait."]
    lateness = "rank 1 called the last 11 collectives 310 ms after the earliest rank, on average"
    assert cause.sentences[-1].text == lateness


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_has_ended_may_not_be_a_member_of_an_unknown_group(code):
    """Rank 2 is not a member of new_group([0, 1]); that it has failed would be a cause."""
    over = rank(2, answers=False, exit_code=code, state="gone")
    cause = find_cause([rank(0, BEFORE, UNRECORDED), rank(1, BEFORE, stack=at(9)), over], world_size=3)
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [1])
    cause = find_cause([*others([0, 1], BEFORE, UNRECORDED), over], world_size=3)
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("ended", [2]), "no live rank is elsewhere"
    failed = replace(over, exit_code=1)
    cause = find_cause([rank(0, BEFORE, UNRECORDED), rank(1, BEFORE, stack=at(9)), failed], world_size=3)
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("ended", [2])


def test_of_several_threads_that_keep_a_process_one_in_user_code_is_named():
    threads = {"pool_0": [sim.torch_frame("x.py", "run")], "reader": at(9)}
    cause = find_cause(rank_1(BEFORE, stack=SHUTDOWN, threads=threads, last_lines=["RuntimeError: x", *["log"] * 5]))
    assert cause is not None
    assert cause.sentences[1].text == f"{RANK_1} has ended its script and waits for thread reader, at"
    cause = find_cause(rank_1(BEFORE, stack=SHUTDOWN))
    assert cause is not None
    assert cause.sentences[1].text == f"{RANK_1} has ended its script and waits for a thread that is not a daemon"


def test_calls_without_a_line_end_without_one():
    first, second = call(40, []), call(40, [], "broadcast")
    cause = find_cause([rank(0, first), rank(1, second)])
    assert cause is not None
    assert [each.text for each in cause.sentences[:2]] == [
        "rank 0 (node gpu-07, pid 4000) called all_reduce #40 (264,970 elements)",
        f"{RANK_1} called broadcast #40 (264,970 elements)",
    ]
    cause = find_cause([rank(0, first), rank(1, replace(first, shapes=[], dtypes=[]))])
    assert cause is not None
    assert [each.text for each in cause.sentences] == [
        "rank 0 (node gpu-07, pid 4000) called all_reduce #40 with float32 [264970]",
        f"{RANK_1} called all_reduce #40",
    ]


CONNECTS = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 2, in main',
    "    dist.init_process_group()",
    "torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0/1",
]


@pytest.mark.parametrize(
    ("culprit", "options", "kind", "text"),
    [
        (1, {"stack": at(9)}, "elsewhere", f"{RANK_1} is at /job/train.py:9: time.sleep(120)"),
        (1, {"state": "stopped"}, "stopped", f"{RANK_1} is stopped by a signal"),
        (
            0,
            {"stack": at(7)},  # below `if rank == 0:`
            "rank_0_only",
            "rank 0 (node gpu-07, pid 4000) is at /job/train.py:7: evaluate(model)",
        ),
    ],
)
def test_a_rank_that_timed_out_before_the_launcher_knew_that_it_waits(culprit, options, kind, text):
    failed = rank(1 - culprit, exit_code=1, last_lines=CONNECTS)
    cause = find_cause([failed, rank(culprit, **options)])
    assert (cause.kind, cause.culprits, cause.waiting) == (kind, [culprit], [1 - culprit])
    lines = format_summary(cause).splitlines()
    assert lines[:3] == [
        f"samestep: rank {1 - culprit} timed out waiting for rank {culprit}.",
        f"  rank {1 - culprit} timed out, at /job/train.py:2: def main(rank):",
        f"  {text}",
    ]


def test_without_a_rank_that_is_left_a_timeout_is_not_explained():
    assert find_cause([rank(number, exit_code=1, last_lines=CONNECTS) for number in (0, 1)]) is None


THREAD_RAISED = [
    "Exception in thread prefetch:",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner',
    "    self.run()",
    '  File "/job/dataset.py", line 3, in __getitem__',
    "    return read(self.files[index])",
    "ValueError: bad file 30",
]
GETS = [Frame("/usr/lib/python3.11/threading.py", 320, "wait"), Frame("/usr/lib/python3.11/queue.py", 171, "get")]
RUNS_CHILD = [Frame("/usr/lib/python3.11/subprocess.py", 1209, "communicate"), *at(9)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"stack": [*GETS, *at(9)], "last_lines": ["epoch 1", *THREAD_RAISED, "epoch 2"]},
            [
                "its thread prefetch raised ValueError: bad file 30, at /job/dataset.py:3: "
                "return read(self.files[index])"
            ],
        ),
        (
            {"stack": at(18), "threads": {"writer 0x7f": at(9), "samestep 0x1": [own("launch/x.py", "f")]}},
            ["its thread writer is at /job/train.py:9: time.sleep(120)"],
        ),
        ({"stack": at(9), "threads": {"writer 0x7f": at(4)}}, []),  # it does not wait for a thread
        (
            {"stack": RUNS_CHILD, "children": [ProcessInfo(4700, "sleeping", "tar xf data.tar")]},
            ["it waits for its child process (pid 4700, `tar xf data.tar`)"],
        ),
        (
            {"stack": RUNS_CHILD, "children": [ProcessInfo(4700, "sleeping", "python", stacks={"main": at(4)})]},
            ["it waits for its child process (pid 4700, `python`), at /job/train.py:4: loss = model(batch).mean()"],
        ),
        ({"stack": RUNS_CHILD, "children": [worker(4701, sim.WAITS_FOR_WORK)]}, []),
    ],
)
def test_what_keeps_a_rank_at_its_line(options, text):
    cause = find_cause(rank_1(BEFORE, **options))
    lines = format_summary(cause).splitlines()
    start = next(index for index, each in enumerate(lines) if each.startswith("  its last collective"))
    end = next(index for index, each in enumerate(lines) if each.startswith("  rank 1 may still arrive"))
    assert (cause.kind, lines[start + 1 : end]) == ("elsewhere", [f"  {each}" for each in text])


def test_the_last_collective_may_be_of_another_process_group():
    other = done(call(40, c10d("all_reduce", 10), group="7", ranks=[1, 2], shape=(3,)))
    cause = find_cause(rank_1(BEFORE, replace(other, called=sim.NOW - 30), stack=at(9)))
    assert "its last collective was all_reduce #40 (3 elements) of another process group, 30 s ago" in format_summary(
        cause
    )


def test_ranks_that_are_still_missing():
    waiting = [*others(ALL_BUT_1, *WAITS)]
    cause = find_cause([*waiting, rank(1, BEFORE, stack=at(9))])
    ended = [replace(each, exit_code=0) for each in waiting]
    assert is_still_missing(cause, [*ended, rank(1, BEFORE, stack=at(9))])
    assert not is_still_missing(cause, [*ended, rank(1, BEFORE, done(call(40)), stack=at(9))])  # it has called it
    assert not is_still_missing(cause, [*ended, rank(1, BEFORE, stack=at(9), answers=False)])
    assert not is_still_missing(cause, [*ended, rank(1, BEFORE, exit_code=0)])
    assert not is_still_missing(replace(cause, collective=None), [*ended, rank(1, BEFORE, stack=at(9))])


def test_a_collective_that_the_script_calls_inside_of_a_forward_pass_is_not_one_of_ddp():
    """For example in training_step of Lightning, below DDP's own forward."""
    inside = [*c10d("barrier", 8)[:3], sim.torch_frame("nn/parallel/distributed.py", "forward"), *at(4)]
    assert describe_call(call(32, inside, "barrier", dtype="")) == "barrier #32"
    buffers = [*c10d("broadcast", 8)[:2], sim.torch_frame("nn/parallel/distributed.py", "_sync_buffers"), *at(4)]
    assert describe_call(call(33, buffers, "broadcast", (5,))) == "broadcast #33 (DDP buffers, 5 elements)"
