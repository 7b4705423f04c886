"""The audit: sound runs are found sound through any restarts, and every fault is found and named."""

import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.cli.audit_command import command
from samestep.data.audit import Fault, ShardReport, audit
from samestep.data.ledger import (
    CAPACITY,
    RECORD,
    SIZE,
    Kind,
    LedgerWriter,
    ShardDescription,
    check_bytes,
    next_generation,
)
from samestep.data.partition import EvaluationPartition, Partition, steps_per_epoch
from samestep.data.permutation import SampleOrder
from samestep.errors import LedgerError

# Memory, where there is such a folder: a sync to disk for every simulated checkpoint would take most of the time.
QUICK = "/dev/shm" if Path("/dev/shm").is_dir() else None

WHOLE = ShardDescription(n=100, seed=7, shuffle=True, global_batch=10)


@dataclass(frozen=True)
class Start:
    """One start of a simulated run: from a global step on, so many steps on so many ranks."""

    size: int
    begin: int
    steps: int
    ending: str = "well"
    """How it ends: well, with an error, or killed, which loses what was not yet written."""
    saved_every: int = 3
    """Steps between two saved positions, before which the ledger is synced."""


def simulate(folder: Path, description: ShardDescription, *starts: Start, evaluate_every: int = 0) -> None:
    """Write the ledger that these starts would leave, each rank with its own cut."""
    for start in starts:
        generation = next_generation(folder, "train")
        for rank in range(start.size):
            _simulate_rank(folder, description, start, generation, rank, evaluate_every)


def _simulate_rank(
    folder: Path, description: ShardDescription, start: Start, generation: int, rank: int, evaluate_every: int
) -> None:
    cut = Partition(description.n, description.global_batch, rank, start.size, drop_last=description.drop_last)
    position = divmod(start.begin, cut.steps)
    writer = LedgerWriter(
        folder, "train", description, rank=rank, size=start.size, generation=generation, start=position
    )
    evaluations = 0
    for done in range(start.begin, start.begin + start.steps):
        epoch, step = divmod(done, cut.steps)
        low, high = cut.slice(step)
        writer.add(epoch, step, low, high - low)
        if rank == start.size - 1:
            writer.add(epoch, step, cut.read_range(step)[0], 1, weight=0.0)  # padding, which must not count
        if (done + 1) % start.saved_every == 0 or (start.ending == "killed" and (done * 7 + rank) % 5 == 0):
            writer.sync()
        if evaluate_every and (done + 1) % evaluate_every == 0:
            evaluate(writer, EvaluationPartition(description.n, 7, rank, start.size), evaluations)
            evaluations += 1
    if start.ending == "killed":
        os.close(writer._file)
    else:
        writer.close(failed=start.ending == "error")


def evaluate(writer: LedgerWriter, batches: EvaluationPartition, number: int) -> None:
    for k in range(len(batches)):
        batch = batches.batch(k)
        writer.evaluated(number, k, batch.start, batch.real)
    writer.passed(number)


def shard(folder: Path) -> ShardReport:
    (only,) = audit(folder).shards
    return only


def path_of(folder: Path, rank: int) -> Path:
    return folder / "ledger" / "train" / f"rank-{rank:05}.bin"


def edit(folder: Path, rank: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the records of a rank, and make them look as if they had been written so."""
    records = change(np.fromfile(path_of(folder, rank), dtype=RECORD))
    records["check"] = check_bytes(records)
    records.tofile(path_of(folder, rank))


def trained(records: np.ndarray, epoch: int, step: int) -> int:
    """The number of the record in which something of a step counted."""
    found = (records["kind"] == Kind.TRAINED) & (records["epoch"] == epoch) & (records["step"] == step)
    return int(np.flatnonzero(found & (records["weight"] > 0))[0])


def kinds(report: ShardReport) -> list[str]:
    return [fault.kind for fault in report.faults]


def the_fault(folder: Path, kind: str) -> Fault:
    (fault,) = (fault for fault in shard(folder).faults if fault.kind == kind)
    return fault


starts = st.builds(
    Start,
    size=st.integers(1, 6),
    begin=st.just(0),
    steps=st.integers(0, 25),
    ending=st.sampled_from(["well", "error", "killed"]),
    saved_every=st.integers(1, 6),
)
descriptions = st.builds(
    ShardDescription,
    n=st.integers(1, 60),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    global_batch=st.integers(1, 20),
    drop_last=st.booleans(),
).filter(lambda description: description.n >= description.global_batch or not description.drop_last)


def continued(drawn: list[Start]) -> list[Start]:
    """Each start from the last position that the one before it saved."""
    told, begin = [], 0
    for start in drawn:
        told.append(replace(start, begin=begin))
        end = begin + start.steps
        saved = end if start.ending == "well" else end // start.saved_every * start.saved_every
        begin = max(begin, saved)
    return told


@given(descriptions, st.lists(starts, min_size=1, max_size=5), st.integers(0, 7))
@settings(max_examples=200)
def test_a_run_is_sound_through_kills_and_changes_of_world_size(description, drawn, evaluate_every):
    run = continued(drawn)
    with tempfile.TemporaryDirectory(dir=QUICK) as folder:
        simulate(Path(folder), description, *run, evaluate_every=evaluate_every)
        report = shard(Path(folder))
    assert report.faults == ()
    assert [(start.world_size, start.number) for start in report.starts] == [
        (start.size, number) for number, start in enumerate(run)
    ]
    steps = steps_per_epoch(description.n, description.global_batch, description.drop_last)
    samples = min(description.n, steps * description.global_batch)
    done = sum(epoch.steps for epoch in report.epochs)
    end = run[-1].begin + run[-1].steps
    assert run[-1].begin <= done <= end
    assert run[-1].ending == "killed" or done == end
    assert [epoch.complete for epoch in report.epochs] == [
        (number + 1) * steps <= done for number in range(len(report.epochs))
    ]
    assert all(epoch.samples == samples for epoch in report.epochs if epoch.complete)


def live_counts(paths: list[Path]) -> Counter:
    """How often each (epoch, position) counted, found one by one; a start supersedes what comes at or after it."""
    records = [record for path in paths for record in np.fromfile(path, dtype=RECORD).tolist()]
    begins = {generation: (epoch, step) for kind, _, generation, epoch, step, *_ in records if kind == Kind.START}
    counts = Counter()
    for kind, _, generation, epoch, step, first, count, weight, _ in records:
        superseded = any(later > generation and begin <= (epoch, step) for later, begin in begins.items())
        if kind == Kind.TRAINED and weight and not superseded:
            counts.update((epoch, position) for position in range(first, first + count))
    return counts


@given(
    descriptions,
    st.lists(starts, min_size=1, max_size=3),
    st.sampled_from(["remove", "repeat", "move", "widen"]),
    st.data(),
)
@settings(max_examples=300)
def test_a_changed_record_is_a_fault_exactly_where_counting_one_by_one_finds_one(description, drawn, change, data):
    run = [*continued(drawn)[:-1], replace(continued(drawn)[-1], ending="well")]
    with tempfile.TemporaryDirectory(dir=QUICK) as name:
        folder = Path(name)
        simulate(folder, description, *run)
        rank = data.draw(st.integers(0, run[-1].size - 1))

        def changed(records):
            places = np.flatnonzero(records["kind"] == Kind.TRAINED)
            if not places.size:
                return records
            at = data.draw(st.sampled_from(places.tolist()))
            if change == "remove":
                return np.delete(records, at)
            if change == "repeat":
                return np.insert(records, at, records[at])
            field = "first" if change == "move" else "count"
            records[field][at] += data.draw(st.integers(1, 3))
            return records

        edit(folder, rank, changed)
        counts = live_counts(sorted((folder / "ledger" / "train").glob("*.bin")))
        report = shard(folder)
    steps = steps_per_epoch(description.n, description.global_batch, description.drop_last)
    expected = Counter()
    for done in range(run[-1].begin + run[-1].steps):
        epoch, step = divmod(done, steps)
        end = min((step + 1) * description.global_batch, description.n)
        expected.update((epoch, position) for position in range(step * description.global_batch, end))
    assert report.exactly_once == (counts == expected)
    missing, again = expected - counts, counts - expected
    named = {kind: sum(fault.count for fault in report.faults if fault.kind == kind) for kind in set(kinds(report))}
    assert named.get("never counted", 0) == missing.total()
    inside = sum(count for place, count in again.items() if place in expected)
    assert named.get("counted again", 0) >= inside
    assert bool(again) <= bool(named.keys() & {"counted again", "wrong step"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """25 steps of 10 samples each, on 2 ranks and, from step 12 on, on 3."""
    simulate(tmp_path, WHOLE, Start(2, 0, 14, "killed"), Start(3, 12, 13), evaluate_every=4)
    return tmp_path


def test_a_sound_run_tells_what_was_done(run):
    report = shard(run)
    assert report.exactly_once
    assert [(epoch.number, epoch.complete, epoch.steps, epoch.samples) for epoch in report.epochs] == [
        (0, True, 10, 100),
        (1, True, 10, 100),
        (2, False, 5, 50),
    ]
    assert [(start.epoch, start.step, start.world_size) for start in report.starts] == [(0, 0, 2), (1, 2, 3)]
    assert [(each.generation, each.number, each.complete, each.samples) for each in report.evaluations] == [
        (0, 0, True, 100),
        (0, 1, True, 100),
        (0, 2, False, 50),  # lost in the kill, on one of two ranks
        (1, 0, True, 100),
        (1, 1, True, 100),
        (1, 2, True, 100),
    ]
    assert report.notes == ()


def test_a_missing_record_is_named_with_its_samples_step_and_rank(run):
    edit(run, 1, lambda records: np.delete(records, trained(records, epoch=1, step=5)))
    samples = SampleOrder(100, 7, shuffle=True).indices(1, 54, 57).tolist()
    named = ", ".join(map(str, samples))
    assert [fault.text for fault in shard(run).faults] == [
        f"epoch 1: 3 samples never counted: {named} in step 5; rank 1 recorded nothing in step 5 (start 1, 3 ranks)"
    ]
    fault = the_fault(run, "never counted")
    assert (fault.epoch, fault.count, fault.positions, fault.samples) == (1, 3, (54, 55, 56), tuple(samples))
    assert (fault.steps, fault.ranks) == ((5,), (1,))


def test_many_missing_samples_are_counted_and_the_first_few_named(run):
    edit(run, 0, lambda records: np.delete(records, [trained(records, 0, 3), trained(records, 0, 4)]))
    fault = the_fault(run, "never counted")
    assert (fault.count, fault.positions) == (10, (30, 31, 32, 33, 34))
    assert ", ... in step 3; rank 0 recorded nothing in step 3 (start 0, 2 ranks)" in fault.text


def test_a_record_that_is_missing_before_a_restart_is_found(run):
    edit(run, 1, lambda records: np.delete(records, trained(records, epoch=1, step=1)))
    assert the_fault(run, "never counted").positions == (15, 16, 17, 18, 19)


def test_what_a_restart_superseded_may_be_missing(run):
    edit(run, 1, lambda records: np.delete(records, trained(records, epoch=1, step=2)))
    assert shard(run).exactly_once  # the first such record is of the first start, which the second did again


def test_a_duplicated_record_is_named_with_its_rank(run):
    edit(run, 2, lambda records: np.insert(records, 3, records[trained(records, 2, 0)]))
    samples = SampleOrder(100, 7, shuffle=True).indices(2, 7, 10).tolist()
    (fault,) = shard(run).faults
    assert fault.text == f"epoch 2: 3 samples counted again: {', '.join(map(str, samples))} in step 0; by rank 2"
    assert (fault.kind, fault.positions, fault.ranks) == ("counted again", (7, 8, 9), (2,))


def test_an_overlap_names_both_ranks(run):
    def widen(records):
        records["count"][trained(records, 1, 8)] += 1
        return records

    edit(run, 0, widen)
    (fault,) = shard(run).faults
    assert (fault.kind, fault.count, fault.positions, fault.ranks) == ("counted again", 1, (84,), (0, 1))


def test_padding_that_counts_is_counted_again(run):
    def heavy(records):
        records["weight"][(records["kind"] == Kind.TRAINED) & (records["weight"] == 0)] = 1
        return records

    edit(run, 2, heavy)
    assert set(kinds(shard(run))) == {"counted again"}


def test_a_weight_other_than_one_is_a_fault(run):
    def halve(records):
        records["weight"][trained(records, 2, 3)] = 0.5
        return records

    edit(run, 1, halve)
    (fault,) = shard(run).faults
    assert fault.kind == "wrong weight"
    assert fault.text.endswith("in step 3; the first weighs 0.5 and not 1; by rank 1")
    assert fault.text.startswith("epoch 2: 3 samples wrong weight: ")


def test_a_record_in_another_step_is_a_fault_though_all_is_counted_once(run):
    def late(records):
        records["step"][trained(records, 2, 3)] = 4
        return records

    edit(run, 1, late)
    (fault,) = shard(run).faults
    assert fault.text == (
        "epoch 2: 1 records are not of their step: rank 1 counted positions 34 to 36 in step 4, which holds 40 to 49"
    )
    assert (fault.kind, fault.steps, fault.ranks, fault.count) == ("wrong step", (4,), (1,), 3)


def test_a_step_beyond_the_epoch_is_a_fault(run):
    def beyond(records):
        at = trained(records, 0, 9)
        records["step"][at], records["first"][at] = 10, 100
        return records

    edit(run, 1, beyond)
    assert set(kinds(shard(run))) == {"wrong step", "never counted"}
    assert the_fault(run, "wrong step").text.endswith("in step 10, which is not in an epoch of 100 samples")


def test_a_record_of_another_rank_is_named_with_its_file(run):
    def sign(records):
        records["rank"][trained(records, 2, 0)] = 0
        return records

    edit(run, 1, sign)
    fault = the_fault(run, "damaged file")
    assert fault.text == "rank-00001.bin: 1 records in it are of rank 0"
    assert fault.ranks == (1, 0)


def test_a_file_that_took_the_place_of_another_is_found(run):
    shutil.copy(path_of(run, 0), path_of(run, 2))
    found = set(kinds(shard(run)))
    assert found == {"damaged file", "wrong rank", "never counted", "counted again"}
    assert "and rank 2 never told of it" in the_fault(run, "wrong rank").text


def test_a_rank_that_the_world_did_not_have_is_named(run):
    def grow(records):
        records["rank"][trained(records, 2, 0)] = 9
        return records

    edit(run, 1, grow)
    assert the_fault(run, "wrong rank").text == "start 1 had 3 ranks, and there are records of rank 9"


def test_a_file_that_is_gone_is_named(run):
    path_of(run, 2).unlink()
    assert the_fault(run, "wrong rank").text == "start 1 had 3 ranks, and rank 2 never told of it"
    assert {fault.ranks for fault in shard(run).faults if fault.kind == "never counted"} == {(2,)}


def test_a_truncated_file_is_found_after_the_run_ended_well(run):
    records = np.fromfile(path_of(run, 1), dtype=RECORD)
    os.truncate(path_of(run, 1), SIZE * (trained(records, 2, 2) + 1) + 11)
    report = shard(run)
    (fault,) = (fault for fault in report.faults if fault.epoch == 2)
    assert (fault.kind, fault.count, fault.ranks) == ("never counted", 6, (1,))
    assert report.notes == (
        "rank-00001.bin: its last 11 bytes are a record torn by a kill or a crash and are left out",
    )


def test_a_truncated_file_is_found_while_the_run_goes_on(tmp_path):
    simulate(tmp_path, WHOLE, Start(2, 0, 35, "killed", saved_every=1))
    records = np.fromfile(path_of(tmp_path, 1), dtype=RECORD)
    os.truncate(path_of(tmp_path, 1), SIZE * trained(records, 1, 6))
    report = shard(tmp_path)
    assert the_fault(tmp_path, "cut off").text == (
        "rank 1 recorded up to epoch 1, step 6, others up to epoch 3, step 5: the file is cut off, or that rank "
        "stopped long before them"
    )
    assert [(fault.epoch, fault.count) for fault in report.faults[1:]] == [(1, 20), (2, 50)]


@pytest.mark.parametrize(("lag", "found"), [(CAPACITY, []), (CAPACITY + 1, ["cut off"])])
def test_a_rank_may_be_behind_by_what_fits_into_memory(tmp_path, lag, found):
    for rank, steps in ((0, lag + 5), (1, 5)):
        writer = LedgerWriter(tmp_path, "train", replace(WHOLE, n=100_000), rank=rank, size=2, generation=0)
        for step in range(steps):
            writer.add(0, step, 10 * step + 5 * rank, 5)
        writer.flush()
        os.close(writer._file)
    report = shard(tmp_path)
    assert kinds(report) == found
    assert [(epoch.steps, epoch.samples) for epoch in report.epochs] == [(5, 50)]


def test_a_rank_a_little_behind_is_no_fault_but_noted(tmp_path):
    simulate(tmp_path, WHOLE, Start(2, 0, 8, "killed", saved_every=100))
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.steps, epoch.samples) for epoch in report.epochs] == [(False, 6, 60)]
    assert report.notes == (
        "rank 0 recorded up to epoch 0, step 6, others up to epoch 0, step 8: judged is what all ranks have written "
        "down",
    )


def test_ranks_that_an_error_ended_at_an_epochs_edge_are_no_fault(tmp_path):
    for rank, steps in ((0, 11), (1, 10)):
        cut = Partition(100, 10, rank, 2)
        writer = LedgerWriter(tmp_path, "train", WHOLE, rank=rank, size=2, generation=0)
        for done in range(steps):
            epoch, step = divmod(done, 10)
            low, high = cut.slice(step)
            writer.add(epoch, step, low, high - low)
        writer.close(failed=True)
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.steps) for epoch in report.epochs] == [(True, 10), (False, 0)]


@pytest.mark.parametrize("torn", [1, SIZE - 1, 3 * SIZE + 5])
def test_a_torn_end_is_tolerated_and_noted(tmp_path, torn):
    simulate(tmp_path, WHOLE, Start(1, 0, 7, "killed", saved_every=1))
    with path_of(tmp_path, 0).open("ab") as file:
        file.write(b"\0" * torn)
    report = shard(tmp_path)
    assert report.exactly_once
    assert report.notes == (
        f"rank-00000.bin: its last {torn} bytes are a record torn by a kill or a crash and are left out",
    )


def test_a_damaged_record_is_named_by_its_number(run):
    with path_of(run, 0).open("r+b") as file:
        file.seek(3 * SIZE + 20)
        file.write(b"\xff")
    fault = the_fault(run, "damaged file")
    assert fault.text == "rank-00000.bin: a record is damaged, the first is number 3"
    assert fault.ranks == (0,)
    assert "never counted" in kinds(shard(run))


def test_ranks_that_disagree_about_a_start_are_named(run):
    def early(records):
        records["step"][(records["kind"] == Kind.START) & (records["generation"] == 1)] = 1
        return records

    edit(run, 2, early)
    fault = the_fault(run, "damaged file")
    assert fault.text == "ranks disagree about start 1: epoch 1, step 1 on 3 ranks and epoch 1, step 2 on 3 ranks"


def test_records_of_a_start_that_nobody_told_of_are_a_fault(tmp_path):
    simulate(tmp_path, WHOLE, Start(1, 0, 5), Start(1, 5, 5))
    edit(tmp_path, 0, lambda r: r[(r["kind"] != Kind.START) | (r["generation"] == 0)])
    assert the_fault(tmp_path, "damaged file").text == "start 1 has records and no rank tells where it began"


def test_a_ledger_that_begins_later_says_so(tmp_path):
    simulate(tmp_path, WHOLE, Start(2, 23, 10))
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(epoch.number, epoch.complete, epoch.steps) for epoch in report.epochs] == [(2, True, 7), (3, False, 3)]
    assert report.notes == ("the ledger begins at epoch 2, step 3: nothing is known of what was before",)


def test_a_restart_after_a_gap_is_a_fault(tmp_path):
    simulate(tmp_path, WHOLE, Start(2, 0, 5), Start(2, 6, 5))
    fault = the_fault(tmp_path, "never counted")
    assert (fault.count, fault.steps, fault.ranks) == (10, (5,), (0, 1))


def test_an_epoch_that_was_left_early_is_a_fault(tmp_path):
    writer = LedgerWriter(tmp_path, "train", WHOLE, rank=0, size=1, generation=0)
    for epoch, step in [(0, 0), (0, 1), (1, 0)]:
        writer.add(epoch, step, 10 * step, 10)
    writer.close()
    fault = the_fault(tmp_path, "never counted")
    assert (fault.epoch, fault.count, fault.steps) == (0, 80, (2,))


def test_a_dropped_tail_is_no_fault_but_noted(tmp_path):
    simulate(tmp_path, replace(WHOLE, n=107, drop_last=True), Start(3, 0, 10))
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.samples) for epoch in report.epochs] == [(True, 100)]
    assert report.notes == ("drop_last leaves 7 of 107 samples out of every epoch, as asked",)


def test_samples_drawn_by_weights_are_named_by_position(tmp_path):
    simulate(tmp_path, replace(WHOLE, weighted=True), Start(2, 0, 10))
    edit(tmp_path, 0, lambda records: np.delete(records, trained(records, 0, 4)))
    fault = the_fault(tmp_path, "never counted")
    assert fault.samples == ()
    assert "5 positions never counted: 40, 41, 42, 43, 44 in step 4" in fault.text


def stream(folder: Path, n: int = 37, size: int = 3, ending: str = "well") -> None:
    """Two epochs of a stream whose length is not told."""
    description = replace(WHOLE, n=None)
    for rank in range(size):
        writer = LedgerWriter(folder, "train", description, rank=rank, size=size, generation=0)
        cut = Partition(n, 10, rank, size)
        for epoch in range(2):
            for step in range(cut.steps):
                low, high = cut.slice(step)
                writer.add(epoch, step, low, high - low)
        writer.close(failed=ending != "well")


@pytest.mark.parametrize("n", [37, 40, 2, 31])
def test_a_stream_is_judged_by_what_it_gave(tmp_path, n):
    stream(tmp_path, n)
    report = shard(tmp_path)
    assert report.exactly_once
    assert [epoch.samples for epoch in report.epochs] == [n, n]
    assert [epoch.complete for epoch in report.epochs] == [True, False]  # nobody knows whether more was to come


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (0, 3), (1, 3)])
def test_what_is_missing_of_a_stream_is_named_by_position_or_rank(tmp_path, epoch, step):
    stream(tmp_path)
    edit(tmp_path, 2, lambda records: np.delete(records, trained(records, epoch, step)))
    (fault,) = shard(tmp_path).faults
    assert (fault.kind, fault.epoch, fault.steps, fault.ranks) == ("never counted", epoch, (step,), (2,))
    assert fault.samples == ()
    if step == 3:
        assert fault.text == f"epoch {epoch}: rank 2 recorded nothing in step 3, the last of the stream"


def test_a_missing_batch_of_an_evaluation_is_named(run):
    def remove(records):
        own = (records["kind"] == Kind.EVALUATED) & (records["generation"] == 1) & (records["epoch"] == 2)
        return np.delete(records, np.flatnonzero(own)[1])

    edit(run, 1, remove)
    (fault,) = shard(run).faults
    assert fault.text == "evaluation 2 of start 1: 7 samples never counted: 41, 42, 43, 44, 45, ..."
    assert (fault.epoch, fault.count, fault.samples) == (None, 7, (41, 42, 43, 44, 45))


def test_a_rank_that_took_no_part_in_an_evaluation_is_named(run):
    edit(run, 2, lambda r: r[(r["kind"] < Kind.EVALUATED) | (r["kind"] == Kind.END) | (r["epoch"] != 1)])
    (fault,) = shard(run).faults
    assert fault.text.startswith("evaluation 1 of start 1: 33 samples never counted: 67, 68, 69, 70, 71, ...")
    assert fault.text.endswith("; rank 2 recorded nothing in it")


def test_a_sample_evaluated_twice_is_named(run):
    def again(records):
        own = np.flatnonzero((records["kind"] == Kind.EVALUATED) & (records["generation"] == 0))
        return np.insert(records, own[0], records[own[0]])

    edit(run, 0, again)
    (fault,) = shard(run).faults
    assert fault.text == "evaluation 0 of start 0: 7 samples counted again: 0, 1, 2, 3, 4, ...; by rank 0"


def test_an_evaluation_that_was_left_early_is_no_fault(tmp_path):
    for rank in range(2):
        writer = LedgerWriter(tmp_path, "train", WHOLE, rank=rank, size=2, generation=0)
        batches = EvaluationPartition(100, 7, rank, 2)
        writer.evaluated(0, 0, batches.batch(0).start, 7)
        evaluate(writer, batches, 1)
        writer.close()
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(each.complete, each.samples) for each in report.evaluations] == [(False, 14), (True, 100)]


def test_a_kill_in_an_evaluation_is_no_fault(tmp_path):
    for rank in range(2):
        writer = LedgerWriter(tmp_path, "train", WHOLE, rank=rank, size=2, generation=0)
        evaluate(writer, EvaluationPartition(100, 7, rank, 2), 0)
        if rank == 0:
            writer.flush()
        os.close(writer._file)
    report = shard(tmp_path)
    assert report.exactly_once
    assert [each.complete for each in report.evaluations] == [False]


def train_until(end: int | None, folder: Path, rank: int, size: int, generation: int, begin: int, saved) -> None:
    """One rank as a process: it saves its position after every sync, and goes on until it is done or killed."""
    cut = Partition(WHOLE.n, WHOLE.global_batch, rank, size)
    writer = LedgerWriter(
        folder, "train", WHOLE, rank=rank, size=size, generation=generation, start=divmod(begin, cut.steps)
    )
    for done in itertools.count(begin) if end is None else range(begin, end):
        epoch, step = divmod(done, cut.steps)
        low, high = cut.slice(step)
        writer.add(epoch, step, low, high - low)
        if done % 23 == 0:
            writer.sync()
            saved[rank] = done + 1
    writer.close()


def test_processes_that_are_killed_at_any_moment_leave_a_sound_ledger():
    fork, begin = multiprocessing.get_context("fork"), 0
    with tempfile.TemporaryDirectory(dir=QUICK) as name:
        folder = Path(name)
        for size, killed in ((3, True), (2, True), (4, True), (2, False)):
            generation, saved = next_generation(folder, "train"), fork.RawArray("q", [begin] * size)
            end = None if killed else begin + 500
            tasks = [(end, folder, rank, size, generation, begin, saved) for rank in range(size)]
            ranks = [fork.Process(target=train_until, args=task) for task in tasks]
            for rank in ranks:
                rank.start()
            while killed and min(saved) < begin + 100:
                time.sleep(0.001)
            for rank in ranks:
                if killed:
                    rank.kill()
                rank.join()
            begin = min(saved) if killed else begin + 500
        report = shard(folder)
    assert report.faults == ()
    assert sum(epoch.steps for epoch in report.epochs) == begin
    assert [start.world_size for start in report.starts] == [3, 2, 4, 2]


def test_a_billion_samples_are_judged_by_ranges(tmp_path):
    n, batch, size = 10**9, 1 << 20, 64
    description = ShardDescription(n=n, seed=0, shuffle=True, global_batch=batch)
    for rank in range(size):
        cut = Partition(n, batch, rank, size)
        writer = LedgerWriter(tmp_path, "train", description, rank=rank, size=size, generation=0)
        for step in range(cut.steps):
            low, high = cut.slice(step)
            writer.add(0, step, low, high - low)
        writer.close()
    report = shard(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.samples) for epoch in report.epochs] == [(True, n)]
    edit(tmp_path, 17, lambda records: np.delete(records, trained(records, 0, 900)))
    fault = the_fault(tmp_path, "never counted")
    low, high = Partition(n, batch, 17, size).slice(900)
    assert (fault.count, fault.positions[0], fault.ranks) == (high - low, low, (17,))
    assert fault.samples == tuple(SampleOrder(n, 0, shuffle=True).indices(0, low, low + 5).tolist())


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_the_command_shows_a_table_and_ends_with_zero(run):
    code, text = invoke(str(run))
    assert code == 0
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["shard", "epochs", "samples", "evaluations", "restarts", "ranks", "verdict"]
    assert lines[2] == [
        "train",
        "2",
        "and",
        "5",
        "steps",
        "250",
        "5",
        "and",
        "1",
        "unfinished",
        "1",
        "2,",
        "3",
        "exactly",
        "once",
    ]


def test_the_command_says_what_is_wrong_and_ends_with_one(run):
    edit(run, 1, lambda records: np.delete(records, trained(records, epoch=1, step=5)))
    code, text = invoke(str(run))
    assert code == 1
    assert "1 fault" in text
    assert f"wrong: train: {shard(run).faults[0].text}\n" in text


def test_the_command_gives_json(run):
    with path_of(run, 2).open("ab") as file:
        file.write(b"torn")
    code, text = invoke(str(run), "--json")
    report = json.loads(text)
    assert code == 0
    assert report["exactly_once"] is True
    assert report["folder"] == str(run)
    (told,) = report["shards"]
    assert (told["name"], told["exactly_once"], told["faults"], len(told["notes"])) == ("train", True, [], 1)
    assert told["epochs"][2] == {"number": 2, "complete": False, "steps": 5, "samples": 50}
    code, text = invoke(str(run))
    assert "note: train: rank-00002.bin: its last 4 bytes" in text


def test_every_shard_of_a_run_is_judged(run):
    for rank in range(2):
        test = replace(WHOLE, shuffle=False)
        writer = LedgerWriter(run, "test", test, rank=rank, size=2, generation=0)
        evaluate(writer, EvaluationPartition(100, 7, rank, 2), 0)
        writer.evaluated(1, 0, rank, 1)
        writer.close()
    edit(run, 1, lambda records: np.delete(records, trained(records, epoch=1, step=5)))
    report = audit(run)
    assert [(each.name, each.exactly_once) for each in report.shards] == [("test", True), ("train", False)]
    assert not report.exactly_once
    _, text = invoke(str(run))
    assert "test 0 0 1 and 1 unfinished 0 2 exactly once" in " ".join(text.split())


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: (folder / "ledger").mkdir()])
def test_a_folder_without_a_ledger_is_told_what_was_looked_for(tmp_path, make):
    make(tmp_path)
    with pytest.raises(
        LedgerError, match=r"is not the folder of a run with a ledger: there is no .*/ledger/SHARD/shard\.json"
    ):
        audit(tmp_path)


def test_a_ledger_without_its_description_is_an_error(run):
    (run / "ledger" / "train" / "shard.json").unlink()
    with pytest.raises(LedgerError, match=r"shard\.json is missing, without which the records beside it mean nothing"):
        audit(run)
