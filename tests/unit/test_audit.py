"""The audit reports no fault for a correct run through any restarts, and finds every fault."""

import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.audit import ShardReport
from samestep.data.ledger import BUFFER_RECORDS, RECORD, RECORD_BYTES, RecordKind, ShardDescription, next_generation
from samestep.data.ledger_reader import Fault, Missing
from samestep.data.partition import EvaluationPartition, Partition, steps_per_epoch
from samestep.data.permutation import SampleOrder
from tests.unit.simulated_ledgers import (
    DESCRIPTION,
    Generation,
    audit_train,
    edit,
    evaluate,
    file_of,
    find_trained,
    open_ledger,
    record_step,
    simulate,
)

# A folder in memory if there is one: an fsync for every simulated checkpoint would take most of the time.
FAST_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


def kinds(report: ShardReport) -> list[str]:
    return [fault.kind for fault in report.faults]


def only_fault(folder: Path, kind: str) -> Fault:
    (fault,) = (fault for fault in audit_train(folder).faults if fault.kind == kind)
    return fault


def only_missing(folder: Path) -> Missing:
    (missing,) = audit_train(folder).missing
    return missing


generations = st.builds(
    Generation,
    world_size=st.integers(1, 6),
    begin=st.just(0),
    steps=st.integers(0, 25),
    ending=st.sampled_from(["success", "error", "killed"]),
    save_every=st.integers(1, 6),
)
descriptions = st.builds(
    ShardDescription,
    n=st.integers(1, 60),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    global_batch=st.integers(1, 20),
    drop_last=st.booleans(),
).filter(lambda description: description.n >= description.global_batch or not description.drop_last)


def resume_each(drawn: list[Generation]) -> list[Generation]:
    """Let each generation begin at the last position that the one before it saved."""
    run, begin = [], 0
    for generation in drawn:
        run.append(replace(generation, begin=begin))
        end = begin + generation.steps
        saved = end if generation.ending == "success" else end // generation.save_every * generation.save_every
        begin = max(begin, saved)
    return run


@pytest.mark.slow
@given(descriptions, st.lists(generations, min_size=1, max_size=5), st.integers(0, 7))
@settings(max_examples=2 * settings().max_examples)
def test_a_run_has_no_faults_after_kills_and_changes_of_world_size(description, drawn, evaluate_every):
    run = resume_each(drawn)
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        simulate(Path(folder), description, *run, evaluate_every=evaluate_every)
        report = audit_train(Path(folder))
    assert report.faults == ()
    assert [(each.world_size, each.number) for each in report.generations] == [
        (each.world_size, number) for number, each in enumerate(run)
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
    """Count how often each (epoch, position) counted; a generation supersedes what comes at or after its start."""
    records = [record for path in paths for record in np.fromfile(path, dtype=RECORD).tolist()]
    begins = {generation: (epoch, step) for kind, _, generation, epoch, step, *_ in records if kind == RecordKind.START}
    counts = Counter()
    for kind, _, generation, epoch, step, first, count, weight, _ in records:
        superseded = any(later > generation and begin <= (epoch, step) for later, begin in begins.items())
        if kind == RecordKind.TRAINED and weight and not superseded:
            counts.update((epoch, position) for position in range(first, first + count))
    return counts


@pytest.mark.slow
@given(
    descriptions,
    st.lists(generations, min_size=1, max_size=3),
    st.sampled_from(["remove", "repeat", "move", "widen"]),
    st.data(),
)
def test_a_changed_record_is_a_fault_exactly_if_counting_every_position_finds_one(description, drawn, change, data):
    run = [*resume_each(drawn)[:-1], replace(resume_each(drawn)[-1], ending="success")]
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as name:
        folder = Path(name)
        simulate(folder, description, *run)
        rank = data.draw(st.integers(0, run[-1].world_size - 1))

        def changed(records):
            candidates = np.flatnonzero(records["kind"] == RecordKind.TRAINED)
            if not candidates.size:
                return records
            at = data.draw(st.sampled_from(candidates.tolist()))
            if change == "remove":
                return np.delete(records, at)
            if change == "repeat":
                return np.insert(records, at, records[at])
            field = "first" if change == "move" else "count"
            records[field][at] += data.draw(st.integers(1, 3))
            return records

        edit(folder, rank, changed)
        counts = live_counts(sorted((folder / "ledger" / "train").glob("*.bin")))
        report = audit_train(folder)
    steps = steps_per_epoch(description.n, description.global_batch, description.drop_last)
    expected = Counter()
    for done in range(run[-1].begin + run[-1].steps):
        epoch, step = divmod(done, steps)
        end = min((step + 1) * description.global_batch, description.n)
        expected.update((epoch, position) for position in range(step * description.global_batch, end))
    assert report.exactly_once == (counts == expected)
    missing, repeated = expected - counts, counts - expected
    totals = {kind: sum(fault.count for fault in report.faults if fault.kind == kind) for kind in set(kinds(report))}
    assert totals.get("never counted", 0) == missing.total()
    inside = sum(count for position, count in repeated.items() if position in expected)
    assert totals.get("counted more than once", 0) >= inside
    assert bool(repeated) <= bool(totals.keys() & {"counted more than once", "wrong step"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Simulate 25 steps of 10 samples each, on 2 ranks and, from step 12 on, on 3 ranks."""
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 14, "killed"), Generation(3, 12, 13), evaluate_every=4)
    return tmp_path


def test_the_report_of_a_run_without_faults_lists_epochs_generations_and_evaluations(run):
    report = audit_train(run)
    assert report.exactly_once
    assert [(epoch.number, epoch.complete, epoch.steps, epoch.samples) for epoch in report.epochs] == [
        (0, True, 10, 100),
        (1, True, 10, 100),
        (2, False, 5, 50),
    ]
    assert [(each.epoch, each.step, each.world_size) for each in report.generations] == [(0, 0, 2), (1, 2, 3)]
    assert [(each.generation, each.number, each.complete, each.samples) for each in report.evaluations] == [
        (0, 0, True, 100),
        (0, 1, True, 100),
        (0, 2, False, 50),  # lost in the kill, on one of two ranks
        (1, 0, True, 100),
        (1, 1, True, 100),
        (1, 2, True, 100),
    ]
    assert report.notes == ("the script left epoch 2 early, after 50 of 100 samples: they were checked",)


def test_a_missing_record_is_reported_with_its_samples_step_and_rank(run):
    edit(run, 1, lambda records: np.delete(records, find_trained(records, epoch=1, step=5)))
    samples = SampleOrder(100, 7, shuffle=True).indices(1, 54, 57).tolist()
    listed = ", ".join(map(str, samples))
    assert [fault.text for fault in audit_train(run).faults] == [
        f"epoch 1: 3 samples never counted: {listed} in step 5; rank 1 recorded nothing in step 5 (generation 1, "
        "3 ranks)"
    ]
    fault = only_fault(run, "never counted")
    assert (fault.epoch, fault.count, fault.positions, fault.samples) == (1, 3, (54, 55, 56), tuple(samples))
    assert (fault.steps, fault.ranks) == ((5,), (1,))


def test_many_missing_samples_are_counted_and_the_first_few_listed(run):
    edit(run, 0, lambda records: np.delete(records, [find_trained(records, 0, 3), find_trained(records, 0, 4)]))
    fault = only_fault(run, "never counted")
    assert (fault.count, fault.positions) == (10, (30, 31, 32, 33, 34))
    assert ", ... in steps 3, 4; rank 0 recorded nothing in step 3 (generation 0, 2 ranks)" in fault.text


def test_a_record_that_is_missing_before_a_restart_is_found(run):
    edit(run, 1, lambda records: np.delete(records, find_trained(records, epoch=1, step=1)))
    assert only_fault(run, "never counted").positions == (15, 16, 17, 18, 19)


def test_a_record_that_a_restart_superseded_may_be_missing(run):
    edit(run, 1, lambda records: np.delete(records, find_trained(records, epoch=1, step=2)))
    assert audit_train(run).exactly_once  # it belongs to generation 0, and generation 1 repeated the step


def test_a_duplicated_record_is_reported_with_its_rank(run):
    edit(run, 2, lambda records: np.insert(records, 3, records[find_trained(records, 2, 0)]))
    samples = SampleOrder(100, 7, shuffle=True).indices(2, 7, 10).tolist()
    (fault,) = audit_train(run).faults
    listed = ", ".join(map(str, samples))
    assert fault.text == f"epoch 2: 3 samples counted more than once: {listed} in step 0; by rank 2"
    assert (fault.kind, fault.positions, fault.ranks) == ("counted more than once", (7, 8, 9), (2,))


def test_an_overlap_is_reported_with_both_ranks(run):
    def widen(records):
        records["count"][find_trained(records, 1, 8)] += 1
        return records

    edit(run, 0, widen)
    (fault,) = audit_train(run).faults
    assert (fault.kind, fault.count, fault.positions, fault.ranks) == ("counted more than once", 1, (84,), (0, 1))


def test_padding_with_weight_1_counts_samples_more_than_once(run):
    def add_weight(records):
        records["weight"][(records["kind"] == RecordKind.TRAINED) & (records["weight"] == 0)] = 1
        return records

    edit(run, 2, add_weight)
    assert set(kinds(audit_train(run))) == {"counted more than once"}


def test_a_weight_other_than_one_is_a_fault(run):
    def halve(records):
        records["weight"][find_trained(records, 2, 3)] = 0.5
        return records

    edit(run, 1, halve)
    (fault,) = audit_train(run).faults
    assert fault.kind == "wrong weight"
    assert fault.text.endswith("in step 3; the first has weight 0.5 instead of 1; by rank 1")
    assert fault.text.startswith("epoch 2: 3 samples with a wrong weight: ")


def test_a_record_in_the_wrong_step_is_a_fault_even_if_every_sample_counted_once(run):
    def late(records):
        records["step"][find_trained(records, 2, 3)] = 4
        return records

    edit(run, 1, late)
    (fault,) = audit_train(run).faults
    assert fault.text == (
        "epoch 2: 1 record(s) in the wrong step: rank 1 counted positions 34 to 36 in step 4, which has 40 to 49"
    )
    assert (fault.kind, fault.steps, fault.ranks, fault.count) == ("wrong step", (4,), (1,), 3)


def test_a_step_beyond_the_epoch_is_a_fault(run):
    def beyond(records):
        at = find_trained(records, 0, 9)
        records["step"][at], records["first"][at] = 10, 100
        return records

    edit(run, 1, beyond)
    assert set(kinds(audit_train(run))) == {"wrong step", "never counted"}
    assert only_fault(run, "wrong step").text.endswith("in step 10, which an epoch of 100 samples does not have")


def test_a_record_of_another_rank_is_reported_with_its_file(run):
    def change_rank(records):
        records["rank"][find_trained(records, 2, 0)] = 0
        return records

    edit(run, 1, change_rank)
    fault = only_fault(run, "corrupt file")
    assert fault.text == "rank-00001.bin: 1 record of rank 0"
    assert fault.ranks == (1, 0)


def test_a_file_that_replaced_another_is_found(run):
    shutil.copy(file_of(run, 0), file_of(run, 2))
    assert set(kinds(audit_train(run))) == {"corrupt file", "counted more than once"}
    assert only_missing(run).text == (
        "generation 1 had 3 ranks, but rank 2 recorded nothing: the file is cut off or was replaced"
    )


def test_a_record_of_a_rank_beyond_the_world_size_is_a_fault(run):
    def raise_rank(records):
        records["rank"][find_trained(records, 2, 0)] = 9
        return records

    edit(run, 1, raise_rank)
    assert only_fault(run, "wrong rank").text == "generation 1 had 3 ranks, but there are records of rank 9"


def test_a_missing_file_is_reported(run):
    file_of(run, 2).unlink()
    missing = only_missing(run)
    assert missing.text == "generation 1 had 3 ranks, but rank 2 recorded nothing: no file of rank 2"
    assert (missing.ranks, missing.epoch, missing.step) == ((2,), 1, 2)
    assert audit_train(run).verdict == "incomplete"


def test_a_truncated_file_is_found_after_a_successful_run(run):
    records = np.fromfile(file_of(run, 1), dtype=RECORD)
    os.truncate(file_of(run, 1), RECORD_BYTES * (find_trained(records, 2, 2) + 1) + 11)
    report = audit_train(run)
    assert report.verdict == "incomplete"
    missing = only_missing(run)
    assert missing.text == (
        "rank 1 of generation 1 recorded no end, but other ranks did: the file is cut off at epoch 2, step 3, or the "
        "process was killed"
    )
    assert (missing.ranks, missing.epoch, missing.step) == ((1,), 2, 3)
    assert report.notes[0] == "rank-00001.bin: the last 11 bytes are an incomplete record of a killed process; ignored"


def test_a_truncated_file_is_found_while_the_run_continues(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 35, "killed", save_every=1))
    records = np.fromfile(file_of(tmp_path, 1), dtype=RECORD)
    os.truncate(file_of(tmp_path, 1), RECORD_BYTES * find_trained(records, 1, 6))
    report = audit_train(tmp_path)
    assert report.verdict == "incomplete"
    assert [missing.text for missing in report.missing] == [
        "the run has not ended (generation 0 has no end record: it is still running, or it was killed and not "
        "resumed); sound up to epoch 1, step 6",
        "rank 1 recorded up to epoch 1, step 6, others up to epoch 3, step 5: the file is cut off",
    ]


@pytest.mark.parametrize(("lag", "found"), [(BUFFER_RECORDS, 1), (BUFFER_RECORDS + 1, 2)])
def test_a_rank_may_be_behind_by_what_fits_into_its_buffer(tmp_path, lag, found):
    for rank, steps in ((0, lag + 5), (1, 5)):
        ledger = open_ledger(tmp_path, replace(DESCRIPTION, n=100_000), rank, 2)
        for step in range(steps):
            ledger.record_training(0, step, 10 * step + 5 * rank, 5)
        ledger.flush()
        os.close(ledger._file)
    report = audit_train(tmp_path)
    assert (report.faults, len(report.missing)) == ((), found)
    assert [(epoch.steps, epoch.samples) for epoch in report.epochs] == [(5, 50)]


def test_a_rank_that_is_slightly_behind_is_a_note(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 8, "killed", save_every=100))
    report = audit_train(tmp_path)
    assert only_missing(tmp_path).text.endswith("sound up to epoch 0, step 6")
    assert [(epoch.complete, epoch.steps, epoch.samples) for epoch in report.epochs] == [(False, 6, 60)]
    assert report.notes == (
        "rank 0 recorded up to epoch 0, step 6, others up to epoch 0, step 8: steps that all ranks have "
        "recorded are checked",
    )


def test_ranks_that_failed_at_the_boundary_of_an_epoch_are_incomplete(tmp_path):
    for rank, steps in ((0, 11), (1, 10)):
        partition = Partition(100, 10, rank, 2)
        ledger = open_ledger(tmp_path, DESCRIPTION, rank, 2)
        for done in range(steps):
            epoch, step = divmod(done, 10)
            record_step(ledger, partition, epoch, step)
        ledger.close(failed=True)
    report = audit_train(tmp_path)
    assert (report.verdict, report.faults) == ("incomplete", ())
    assert only_missing(tmp_path).text == (
        "the run failed at epoch 1, step 1 in generation 0 and was not resumed; sound up to epoch 1, step 0"
    )
    assert [(epoch.complete, epoch.steps) for epoch in report.epochs] == [(True, 10), (False, 0)]


def test_a_run_that_was_stopped_early_is_incomplete(tmp_path):
    ledger = open_ledger(tmp_path, DESCRIPTION, 0, 1)
    ledger.record_training(0, 0, 0, 10)
    ledger.close(early=True)
    assert audit_train(tmp_path).verdict == "incomplete"
    assert only_missing(tmp_path).text == (
        "the run was stopped early at epoch 0, step 1 in generation 0 and was not resumed; sound up to epoch 0, step 1"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_step_that_the_script_skipped_is_a_fault(tmp_path, stream):
    ledger = open_ledger(tmp_path, replace(DESCRIPTION, n=None if stream else 20), 0, 1)
    for epoch in range(2):
        ledger.record_training(epoch, 0, 0, 10)
        ledger.record_training(epoch, 1, 10, 10, weight=1.0 - epoch)
        if stream:
            ledger.record_stream_end(epoch, 2, 20)
    ledger.close()
    fault = only_fault(tmp_path, "never counted")
    assert (fault.epoch, fault.count) == (1, 10)
    assert fault.text.endswith("in step 1; the script skipped step 1 (generation 0, 1 ranks)")


def test_an_epoch_of_a_stream_without_its_end_is_incomplete(tmp_path):
    ledger = open_ledger(tmp_path, replace(DESCRIPTION, n=None), 0, 1)
    for epoch in range(2):
        ledger.record_training(epoch, 0, 0, 10)
    ledger.close()
    report = audit_train(tmp_path)
    assert only_missing(tmp_path).text == (
        "epoch 0: the end of the stream was not reached, so its later records are unknown"
    )
    assert report.notes == ("the script left epoch 1 early, after 10 samples: they were checked",)


def test_a_run_that_counted_nothing_and_one_with_sampling_weights_have_notes(tmp_path):
    open_ledger(tmp_path, replace(DESCRIPTION, weighted=True), 0, 1).close()
    assert audit_train(tmp_path).notes == (
        "samples were drawn with sampling weights: positions counted exactly once, not samples",
        "no sample counted in training or in an evaluation",
    )


@pytest.mark.parametrize("incomplete", [1, RECORD_BYTES - 1, 3 * RECORD_BYTES + 5])
def test_an_incomplete_last_record_is_a_note(tmp_path, incomplete):
    simulate(tmp_path, DESCRIPTION, Generation(1, 0, 7, "killed", save_every=1))
    with file_of(tmp_path, 0).open("ab") as file:
        file.write(b"\0" * incomplete)
    report = audit_train(tmp_path)
    assert only_missing(tmp_path).text.endswith("sound up to epoch 0, step 7")
    assert report.notes == (
        f"rank-00000.bin: the last {incomplete} bytes are an incomplete record of a killed process; ignored",
    )


def test_a_corrupt_record_is_reported_with_its_number(run):
    with file_of(run, 0).open("r+b") as file:
        file.seek(10 * RECORD_BYTES + 20)  # the start record, six options and a probe come first
        file.write(b"\xff")
    fault = only_fault(run, "corrupt file")
    assert fault.text == "rank-00000.bin: 1 corrupt record, first record 10"
    assert fault.ranks == (0,)
    assert "never counted" in kinds(audit_train(run))


def test_ranks_that_disagree_about_a_start_are_a_fault(run):
    def early(records):
        records["step"][(records["kind"] == RecordKind.START) & (records["generation"] == 1)] = 1
        return records

    edit(run, 2, early)
    fault = only_fault(run, "corrupt file")
    assert fault.text == (
        "ranks disagree about the start of generation 1: epoch 1, step 1 on 3 ranks and epoch 1, step 2 on 3 ranks"
    )


def test_a_generation_without_a_start_record_is_a_fault(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(1, 0, 5), Generation(1, 5, 5))
    edit(tmp_path, 0, lambda r: r[(r["kind"] != RecordKind.START) | (r["generation"] == 0)])
    assert only_fault(tmp_path, "corrupt file").text == "generation 1 has records but no start record"


def test_a_ledger_that_begins_after_step_0_is_incomplete(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(2, 23, 10))
    report = audit_train(tmp_path)
    assert report.verdict == "incomplete"
    assert [(epoch.number, epoch.complete, epoch.steps) for epoch in report.epochs] == [(2, True, 7), (3, False, 3)]
    assert only_missing(tmp_path).text == "the ledger begins at epoch 2, step 3: earlier steps are not in it"


def test_a_restart_after_a_gap_is_a_fault(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 5), Generation(2, 6, 5))
    fault = only_fault(tmp_path, "never counted")
    assert (fault.count, fault.steps, fault.ranks) == (10, (5,), (0, 1))


def test_an_epoch_that_was_left_early_is_a_fault(tmp_path):
    ledger = open_ledger(tmp_path, DESCRIPTION, 0, 1)
    for epoch, step in [(0, 0), (0, 1), (1, 0)]:
        ledger.record_training(epoch, step, 10 * step, 10)
    ledger.close()
    fault = only_fault(tmp_path, "never counted")
    assert (fault.epoch, fault.count, fault.steps) == (0, 80, (2, 3, 4, 5, 6))
    assert "in steps 2, 3, 4, 5, 6, ...; " in fault.text


def test_samples_dropped_by_drop_last_are_a_note(tmp_path):
    simulate(tmp_path, replace(DESCRIPTION, n=107, drop_last=True), Generation(3, 0, 10))
    report = audit_train(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.samples) for epoch in report.epochs] == [(True, 100)]
    assert report.notes == ("drop_last=True leaves 7 of 107 samples out of every epoch",)


def test_samples_drawn_with_weights_are_listed_by_position(tmp_path):
    simulate(tmp_path, replace(DESCRIPTION, weighted=True), Generation(2, 0, 10))
    edit(tmp_path, 0, lambda records: np.delete(records, find_trained(records, 0, 4)))
    fault = only_fault(tmp_path, "never counted")
    assert fault.samples == ()
    assert "5 positions never counted: 40, 41, 42, 43, 44 in step 4" in fault.text


def simulate_stream(folder: Path, n: int = 37, size: int = 3) -> None:
    """Write the ledger of two epochs of a stream, which does not know its length."""
    description = replace(DESCRIPTION, n=None)
    for rank in range(size):
        ledger = open_ledger(folder, description, rank, size)
        partition = Partition(n, 10, rank, size)
        for epoch in range(2):
            for step in range(partition.steps):
                record_step(ledger, partition, epoch, step)
            ledger.record_stream_end(epoch, partition.steps, n)
        ledger.close()


@pytest.mark.parametrize("n", [37, 40, 2, 31])
def test_the_length_of_a_stream_is_what_it_yielded(tmp_path, n):
    simulate_stream(tmp_path, n)
    report = audit_train(tmp_path)
    assert report.exactly_once
    assert [epoch.samples for epoch in report.epochs] == [n, n]
    assert [epoch.complete for epoch in report.epochs] == [True, True]


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (0, 3), (1, 3)])
def test_a_missing_record_of_a_stream_is_reported_with_position_or_rank(tmp_path, epoch, step):
    simulate_stream(tmp_path)
    edit(tmp_path, 2, lambda records: np.delete(records, find_trained(records, epoch, step)))
    (fault,) = audit_train(tmp_path).faults
    assert (fault.kind, fault.epoch, fault.steps, fault.ranks) == ("never counted", epoch, (step,), (2,))
    assert fault.samples == ()
    assert "rank 2 recorded nothing in step" in fault.text


def test_a_missing_record_in_the_last_known_step_of_a_stream_is_reported_with_its_rank(tmp_path):
    simulate_stream(tmp_path)
    for rank in range(3):
        edit(tmp_path, rank, lambda records: records[records["kind"] != RecordKind.STREAM_END])
    edit(tmp_path, 2, lambda records: np.delete(records, find_trained(records, 1, 3)))
    (fault,) = audit_train(tmp_path).faults
    assert fault.text == "epoch 1: rank 2 recorded nothing in step 3, the last of the stream"


def test_a_missing_batch_of_an_evaluation_is_reported(run):
    def remove(records):
        own = (records["kind"] == RecordKind.EVALUATED) & (records["generation"] == 1) & (records["epoch"] == 2)
        return np.delete(records, np.flatnonzero(own)[1])

    edit(run, 1, remove)
    (fault,) = audit_train(run).faults
    assert fault.text == "evaluation 2 of generation 1: 7 samples never counted: 41, 42, 43, 44, 45, ..."
    assert (fault.epoch, fault.count, fault.samples) == (None, 7, (41, 42, 43, 44, 45))


def test_a_rank_without_records_of_an_evaluation_is_reported(run):
    edit(run, 2, lambda r: r[(r["kind"] < RecordKind.EVALUATED) | (r["kind"] == RecordKind.END) | (r["epoch"] != 1)])
    (fault,) = audit_train(run).faults
    assert fault.text.startswith("evaluation 1 of generation 1: 33 samples never counted: 67, 68, 69, 70, 71, ...")
    assert fault.text.endswith("; rank 2 recorded nothing in it")


def test_a_sample_that_was_evaluated_twice_is_reported(run):
    def repeat(records):
        own = np.flatnonzero((records["kind"] == RecordKind.EVALUATED) & (records["generation"] == 0))
        return np.insert(records, own[0], records[own[0]])

    edit(run, 0, repeat)
    (fault,) = audit_train(run).faults
    assert fault.text == (
        "evaluation 0 of generation 0: 7 samples counted more than once: 0, 1, 2, 3, 4, ...; by rank 0"
    )


def test_an_evaluation_that_was_left_early_is_not_a_fault(tmp_path):
    for rank in range(2):
        ledger = open_ledger(tmp_path, DESCRIPTION, rank, 2)
        batches = EvaluationPartition(100, 7, rank, 2)
        ledger.record_evaluation(ledger.begin_evaluation(0, 0), 0, batches.batch(0).start, 7)
        evaluate(ledger, batches)
        ledger.close()
    report = audit_train(tmp_path)
    assert report.exactly_once
    assert [(each.complete, each.samples) for each in report.evaluations] == [(False, 14), (True, 100)]


def test_a_kill_during_an_evaluation_is_not_a_fault(tmp_path):
    for rank in range(2):
        ledger = open_ledger(tmp_path, DESCRIPTION, rank, 2)
        evaluate(ledger, EvaluationPartition(100, 7, rank, 2))
        if rank == 0:
            ledger.flush()
        os.close(ledger._file)
    report = audit_train(tmp_path)
    assert report.faults == ()
    assert "the run has not ended" in only_missing(tmp_path).text
    assert [each.complete for each in report.evaluations] == [False]


def train_until(end: int | None, folder: Path, rank: int, size: int, generation: int, begin: int, saved) -> None:
    """Train as one rank, saving the position after every sync, until the end or a kill."""
    partition = Partition(DESCRIPTION.n, DESCRIPTION.global_batch, rank, size)
    ledger = open_ledger(folder, DESCRIPTION, rank, size, generation, start=divmod(begin, partition.steps))
    for done in itertools.count(begin) if end is None else range(begin, end):
        epoch, step = divmod(done, partition.steps)
        record_step(ledger, partition, epoch, step)
        if done % 23 == 0:
            ledger.sync()
            saved[rank] = done + 1
    ledger.close()


@pytest.mark.slow
def test_processes_that_are_killed_at_any_moment_leave_a_ledger_without_faults():
    fork, begin = multiprocessing.get_context("fork"), 0
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as name:
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
        report = audit_train(folder)
    assert report.faults == ()
    assert sum(epoch.steps for epoch in report.epochs) == begin
    assert [each.world_size for each in report.generations] == [3, 2, 4, 2]


def test_a_billion_samples_are_audited_as_ranges(tmp_path):
    n, batch, size = 10**9, 1 << 20, 64
    description = ShardDescription(n=n, seed=0, shuffle=True, global_batch=batch)
    for rank in range(size):
        partition = Partition(n, batch, rank, size)
        ledger = open_ledger(tmp_path, description, rank, size)
        for step in range(partition.steps):
            record_step(ledger, partition, 0, step)
        ledger.close()
    report = audit_train(tmp_path)
    assert report.exactly_once
    assert [(epoch.complete, epoch.samples) for epoch in report.epochs] == [(True, n)]
    edit(tmp_path, 17, lambda records: np.delete(records, find_trained(records, 0, 900)))
    fault = only_fault(tmp_path, "never counted")
    low, high = Partition(n, batch, 17, size).slice(900)
    assert (fault.count, fault.positions[0], fault.ranks) == (high - low, low, (17,))
    assert fault.samples == tuple(SampleOrder(n, 0, shuffle=True).indices(0, low, low + 5).tolist())


def change_probe(field, value, generation=1):
    def change(records):
        records[field][(records["kind"] == RecordKind.PROBE) & (records["generation"] == generation)] = value
        return records

    return change


def test_a_rank_that_read_other_data_is_a_fault(run):
    edit(run, 2, change_probe("count", 4))
    fault = only_fault(run, "different data")
    assert fault.text == (
        "sample 5 was not the same for rank 0 of generation 0 and rank 2 of generation 1: they did not read the same "
        "data"
    )
    assert (fault.samples, fault.ranks) == ((5,), (0, 2))


def test_rounding_of_floating_point_values_is_not_other_data_but_more_is(run):
    def sketch(first, second):
        return int(np.array([first, second], dtype=np.float32).view(np.uint64)[0])

    edit(run, 1, change_probe("first", sketch(0.251, -1.499)))
    assert audit_train(run).exactly_once
    edit(run, 1, change_probe("first", sketch(0.251, -1.4)))
    only_fault(run, "different data")


def test_a_start_with_other_options_is_a_fault(run):
    def change(records):
        own = (records["kind"] == RecordKind.OPTION) & (records["epoch"] == 5) & (records["generation"] == 1)
        records["first"][own] += 1
        return records

    edit(run, 0, change)
    fault = only_fault(run, "different data")
    assert fault.text == "sampling_weights is not the same for rank 0 of generation 0 and rank 0 of generation 1"


def test_probes_that_only_some_ranks_recorded_are_a_fault_and_none_at_all_is_incomplete(run):
    def without_probes(records):
        return records[(records["kind"] != RecordKind.PROBE) | (records["generation"] == 0)]

    edit(run, 0, without_probes)
    assert "rank 0 recorded no probes of the data, but other ranks did" in only_fault(run, "corrupt file").text
    for rank in range(1, 3):
        edit(run, rank, without_probes)
    assert audit_train(run).verdict == "incomplete"
    assert only_missing(run).text == (
        "generation 1: ranks 0, 1, 2 recorded no probes of the data, so it is unknown whether all ranks read the same "
        "data"
    )


@pytest.mark.parametrize("size", [1, RECORD_BYTES, 2 * RECORD_BYTES, 5 * RECORD_BYTES])
def test_a_stream_whose_end_is_cut_off_on_all_ranks_is_incomplete(tmp_path, size):
    simulate_stream(tmp_path)
    assert audit_train(tmp_path).verdict == "sound"
    for rank in range(3):
        os.truncate(file_of(tmp_path, rank), file_of(tmp_path, rank).stat().st_size - size)
    assert audit_train(tmp_path).verdict == "incomplete"
    assert "the run has not ended" in only_missing(tmp_path).text


def test_an_epoch_of_a_stream_without_records_is_a_fault(tmp_path):
    simulate_stream(tmp_path)
    for rank in range(3):
        edit(tmp_path, rank, lambda records: records[(records["kind"] != RecordKind.TRAINED) | (records["epoch"] != 0)])
    assert only_fault(tmp_path, "never counted").count == 37


def test_starts_that_have_no_records_are_missing(tmp_path):
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 5), Generation(2, 5, 5), Generation(2, 10, 5))
    for rank in range(2):
        edit(tmp_path, rank, lambda records: records[records["generation"] != 1])
    report = audit_train(tmp_path)
    assert report.verdict == "faulty"  # the samples of that start are gone, too
    assert only_missing(tmp_path).text == "the run was started 3 times, and there are no records of generation 1"
    assert only_fault(tmp_path, "never counted").count == 50
