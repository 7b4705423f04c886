"""A rank that makes the others wait in a script that does not measure it is named once, and no other rank is."""

import json
import random
from collections import Counter

import pytest
from torch.distributed import HashStore

from samestep.hang.evidence import Frame, Progress
from samestep.launch.hang_exchange import NodeStore
from samestep.launch.straggler_watch import Looks, StragglerWatch, find_activity, find_straggler, format_straggler

SLEEP = [Frame("/home/ada/train.py", 7, "train")]
LOADER = [
    Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"),
    Frame("/venv/site-packages/torch/utils/data/dataloader.py", 1275, "_try_get_data"),
    Frame("/home/ada/train.py", 5, "train"),
]
DATASET = [
    Frame("/home/ada/rows.py", 3, "__getitem__"),
    Frame("/venv/site-packages/torch/utils/data/_utils/fetch.py", 52, "fetch"),
    Frame("/venv/site-packages/torch/utils/data/dataloader.py", 788, "_next_data"),
    Frame("/home/ada/train.py", 5, "train"),
]
SAVE = [
    Frame("/venv/site-packages/torch/serialization.py", 966, "_save"),
    Frame("/home/ada/train.py", 9, "train"),
]


class Ranks:
    """Ranks that wait for a part of each step, asked once per second; a step may take longer than a second."""

    def __init__(self, shares, step_seconds=0.05, seed=0, stack=SLEEP):
        self.shares, self.step_seconds, self.stack = shares, step_seconds, stack
        self._random = random.Random(seed)
        self._step, self._until, self._waits_from = 0, 0.0, dict[int, float]()

    def at(self, now):
        """What each rank answers."""
        if now >= self._until:  # another step
            self._step += 1
            self._until = now + self._random.random() * self.step_seconds
            late = {rank: self._random.gauss(share, 0.1) for rank, share in self.shares.items()}
            self._waits_from = {rank: self._until - self.step_seconds * share for rank, share in late.items()}
        waits = {rank: now >= begin for rank, begin in self._waits_from.items()}
        return {rank: Progress(self._step, 0.0, 60.0, 0.1, is_waiting=waits[rank], stack=self.stack) for rank in waits}


def named(ranks, minutes, nodes=None):
    """The ranks that are named."""
    watch, pauses, now, found = (
        StragglerWatch("gpu-01", dict.fromkeys(ranks.shares, 1), nodes),
        random.Random(1),
        0.0,
        [],
    )
    while now < 60 * minutes:
        now += pauses.uniform(0.8, 1.2)
        watch.look(ranks.at(now), now)
        if (straggler := watch.find()) is not None:
            found.append(straggler)
    return found


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize(("cost", "minutes"), [(0.8, 3), (0.4, 6), (0.2, 30)])
def test_a_rank_that_the_others_wait_for_is_named_once(size, cost, minutes):
    shares = dict.fromkeys(range(size), 0.15 + cost) | {size - 1: 0.15}
    (straggler,) = named(Ranks(shares), minutes)
    assert straggler.rank == size - 1
    assert straggler.cost == pytest.approx(cost, abs=0.15)


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("step_seconds", [0.05, 7.0, 60.0])
def test_of_ranks_that_wait_for_as_long_as_each_other_none_is_named(size, step_seconds):
    for seed in range(5):
        assert not named(Ranks(dict.fromkeys(range(size), 0.3), step_seconds, seed), 60)


def test_a_rank_that_costs_less_than_a_tenth_of_the_time_is_not_named():
    assert not named(Ranks({0: 0.23, 1: 0.15}), 120)


def test_a_rank_that_is_slow_in_one_long_wait_only_is_not_named():
    watch = StragglerWatch("gpu-01", {0: 1, 1: 2}, None)
    for second in range(1, 500):
        is_waiting = 100 < second < 160  # for a minute, in the same collective
        calls = second if not is_waiting else 100
        answers = {rank: Progress(calls, 0.0, 600.0, 0.1, is_waiting=is_waiting and not rank) for rank in range(2)}
        watch.look(answers, float(second))
        assert watch.find() is None


def test_a_rank_of_another_node_is_named_and_the_nodes_exchange_little():
    store = HashStore()
    nodes = [NodeStore(store, "hang", node, 2) for node in range(2)]
    watches = [StragglerWatch(f"gpu-0{node}", {node: 40 + node}, nodes[node]) for node in range(2)]
    ranks, found, writes = Ranks({0: 0.7, 1: 0.1}, stack=LOADER), [], 0
    write = nodes[1].set

    def counted(key, value):
        nonlocal writes
        writes += 1
        write(key, value)

    nodes[1].set = counted
    for second in range(1, 301):
        answers = ranks.at(float(second))
        for node in (1, 0):
            watches[node].look({node: answers[node]}, float(second))
        if (straggler := watches[0].find()) is not None:
            found.append(straggler)
    for node in nodes:
        node.close()
    assert [(each.rank, each.looks.node, each.looks.pid, each.activity) for each in found] == [
        (1, "gpu-01", 41, "data")
    ]
    assert writes == 10


def test_ranks_that_measure_it_themselves_or_do_not_answer_are_not_counted():
    watch = StragglerWatch("gpu-01", {0: 1, 1: 2}, None)
    for second in range(1, 500):
        waits = Progress(second, 0.0, 60.0, 0.1, is_waiting=True)
        works = Progress(second, 0.0, 60.0, 0.1, stack=SLEEP)
        answers = [
            {0: waits, 1: Progress(second, 0.0, 60.0, 0.1, is_measured=True)},  # a Run
            {0: waits, 1: None},
            {0: waits},  # rank 1 has ended
            {0: waits, 1: Progress(0, 0.0, 60.0)},  # it starts
        ]
        watch.look(answers[second % 4], float(second))
        assert watch.find() is None
    assert watch.to_json() == {0: ["gpu-01", 1, 0, 0, 0, []], 1: ["gpu-01", 2, 0, 0, 0, []]}
    for second in range(500, 700):  # all others count
        watch.look({0: waits, 1: works}, float(second))
        watch.look({0: waits, 1: works}, second + 0.2)  # more often than once per second, since a rank waits
    assert watch.to_json()[1] == ["gpu-01", 2, 200, 0, 0, [["compute", "/home/ada/train.py", 7, 200]]]


def test_what_ranks_did_is_read_back():
    looks = Looks("gpu-01", 7, 9, 3, 2, Counter({("data", "a.py", 1): 4, ("compute", "a.py", 2): 2}))
    assert Looks.from_json(json.loads(json.dumps(looks.to_json()))) == looks


@pytest.mark.parametrize(
    ("stack", "activity"),
    [(SLEEP, "compute"), (LOADER, "data"), (DATASET, "data"), (SAVE, "checkpoint"), ([], "compute")],
)
def test_what_a_rank_does_follows_from_its_stack(stack, activity):
    assert find_activity(stack) == activity


def slow_rank(ranks, activity):
    lines = Counter({("compute", "train.py", 9): 20, (activity, "train.py", 5): 60})
    others = {
        rank: Looks("gpu-01", rank, 100, 70, 70, Counter({("compute", "train.py", 9): 30})) for rank in range(ranks)
    }
    return find_straggler(others | {1: Looks("gpu-07", 4411, 100, 5, 5, lines)})


def test_the_summary_says_what_the_rank_does_and_what_to_do():
    assert format_straggler(slow_rank(2, "data"), lambda frame: f"{frame}: for rows in loader:") == (
        "samestep: rank 1 is slow: rank 0 waits for it for about 65% of the time.\n"
        "  rank 1 (node gpu-07, pid 4411) is in collectives for 5% of the time, rank 0 for 70%\n"
        "  it spends more time reading data than rank 0: for 60% of the time it is at train.py:5: for rows in loader:\n"
        "  what to do: pass a larger num_workers to its DataLoader, and check the disk or network from which its node "
        "reads"
    )
    text = format_straggler(slow_rank(8, "checkpoint"), str)
    assert text.startswith("samestep: rank 1 is slow: the other 7 ranks wait for it for about 65% of the time.\n")
    assert "it spends more time saving checkpoints than the others: for 60% of the time it is at train.py:5\n" in text
    assert text.endswith("what to do: save less often, and check the disk that this rank writes to")
    assert "it spends more time computing than rank 0" in format_straggler(slow_rank(2, "compute"), str)
