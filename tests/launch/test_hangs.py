"""A hang over NCCL: the rank that does not come and its line are the cause, not the ranks that wait for it."""

import json
import re
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch.distributed as dist

from samestep.distributed import process_group
from samestep.distributed.process_group import Hang, ProgressReport, find_hang
from tests.launch.launched import start, wait_for

TIMEOUT, LONG, SHORT = 20, 25, 22  # before the end of SHORT a rank that waits may still be ended by gloo


def report(rank, waits, idle=LONG, line="train.py:31", **counts):
    return ProgressReport(rank, {name: (count, TIMEOUT) for name, count in counts.items()}, idle, waits, line)


def test_a_rank_that_has_not_called_the_collective_of_the_others_is_absent():
    reports = [report(0, True, world=40), report(1, False, line="train.py:27", world=39), report(2, True, world=41)]
    assert find_hang(reports) == Hang([0, 2], {1: "train.py:27"}, LONG)


@pytest.mark.parametrize(
    "reports",
    [
        [],
        [report(0, True, world=40)],  # the other rank makes progress, or cannot report
        [report(0, False, world=40), report(1, False, world=39)],  # no rank waits: they compute
        [report(0, None, world=40), report(1, None, world=40)],
        [report(0, True, a=9, b=3), report(1, True, a=8, b=4)],  # each waits for the other in another group
        [report(0, True, world=40), report(1, True, world=40)],  # a network that is interrupted
        [report(0, True, world=40), report(1, False, world=40)],  # both have called it
        [report(0, True, idle=SHORT, world=40), report(1, False, world=39)],  # the timeout is not over
        [report(0, True, world=40), report(1, False, other=39)],  # not in the same group
    ],
)
def test_nothing_else_is_a_hang(reports):
    assert find_hang(reports) is None


def test_if_torch_does_not_know_whether_a_rank_waits_a_hang_is_not_certain():
    """The ranks may compute, after point-to-point calls that only some of them have made."""
    reports = [report(0, None, world=40), report(1, None, line="train.py:27", world=39), report(2, None, world=41)]
    found = find_hang(reports)
    assert found == Hang([0, 2], {1: "train.py:27"}, LONG, is_certain=False)
    assert found.notice() == (
        "samestep: the run may hang: rank(s) 0, 2 have called more collectives over NCCL than others, and the last one "
        "25 s ago: rank 1 is at train.py:27. Without its flight recorder torch does not say whether they wait, so NCCL "
        "ends the run if they do: set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 so that samestep ends it with the cause"
    )
    assert find_hang([report(0, True, world=40), *reports[1:]]).is_certain


def test_a_rank_that_waits_itself_is_not_the_one_that_others_wait_for():
    """Hybrid: rank 2 waits for rank 0, which waits for rank 1 in another group."""
    reports = [
        report(0, True, a=9, c=4),
        report(1, False, line="train.py:27", a=8, d=4),
        report(2, True, b=9, c=5),
        report(3, True, b=9, d=5),
    ]
    assert find_hang(reports) == Hang([0, 2, 3], {1: "train.py:27"}, LONG)


def test_a_longer_timeout_of_a_group_counts():
    ahead = ProgressReport(0, {"world": (40, 60.0)}, LONG, True, "train.py:31")
    behind = report(1, False, world=39)
    assert find_hang([ahead, behind]) is None
    assert find_hang([ProgressReport(0, ahead.counts, 65.0, True, "train.py:31"), behind]) is not None


def test_each_rank_gets_the_sentence_that_concerns_it():
    hang = Hang([0, 2], {1: "train.py:27"}, 25.2)
    assert str(hang.error(report(1, False, line="train.py:27", world=39))) == (
        "rank 1 has not called a collective in which 2 other rank(s) have waited for 25 s: it is at train.py:27. If it "
        "is still progressing, raise the timeout with Run(step_timeout=...); otherwise every rank must make the same "
        "calls in the same order (is one of them under `if run.is_main:`?)"
    )
    assert str(hang.error(report(0, True, world=40))) == (
        "rank 0 has waited at train.py:31 for 25 s, because 1 rank(s) have not called the same collective: rank 1 is "
        "at train.py:27"
    )


class Ended(BaseException):
    """Raised instead of the end of the process."""


def test_a_rank_ends_also_if_the_store_is_gone(monkeypatch, tmp_path, capsys):
    def end(code):
        raise Ended(code)

    class GoneStore(dist.HashStore):
        def add(self, key, amount):
            raise RuntimeError("connection reset")

    monkeypatch.setattr(process_group.os, "_exit", end)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    watch = process_group.HangWatch(GoneStore(), 1, 2, "gloo", lambda: False)
    watch.stop()
    own = report(1, False, line="train.py:27", world=39)
    with pytest.raises(Ended, match="1"):
        watch._end(Hang([0], {1: "train.py:27"}, 25.0).error(own), 2)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"].startswith("CommunicationError: rank 1 has not called a collective in which 1 other rank")
    assert "test_a_rank_ends_also_if_the_store_is_gone" in message["extraInfo"]["py_callstack"]  # the main thread
    assert "it is at train.py:27" in capsys.readouterr().err


def test_a_rank_sends_nothing_before_the_timeout_and_withdraws_its_report_when_it_continues(monkeypatch):
    counts, looks, store = {"world": (5, 60.0)}, [], dist.HashStore()

    def look(backend):
        looks.append(store.num_keys())
        return dict(counts)

    monkeypatch.setattr(process_group, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(process_group, "collective_counts", look)
    watch = process_group.HangWatch(store, 0, 2, "gloo", lambda: True)
    try:
        wait_for(lambda: len(looks) > 20, 120)
        assert set(looks) == {0}
        counts["world"] = (5, 0.0)  # the timeout is over
        wait_for(lambda: store.check(["hang/report/0"]), 120)
        counts["world"] = (6, 60.0)  # a collective
        wait_for(lambda: store.get("hang/report/0") == b"", 120)
    finally:
        watch.stop()
    assert not store.check(["hang"])  # the other rank has not reported


def test_a_hang_that_is_not_certain_is_printed_once_and_ends_no_rank(monkeypatch, capfd):
    store, looks = dist.HashStore(), []

    def look(backend):
        looks.append(backend)
        return {"world": (5, 0.0)}

    monkeypatch.setattr(process_group, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(process_group, "_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(process_group, "collective_counts", look)
    other = ProgressReport(1, {"world": (4, 0.0)}, LONG, None, "train.py:27")
    store.set("hang/report/1", json.dumps(asdict(other)))
    watch = process_group.HangWatch(store, 0, 2, "gloo", lambda: None)
    try:
        wait_for(lambda: len(looks) > 20, 120)
    finally:
        watch.stop()
    assert not store.check(["hang"])
    assert capfd.readouterr().err.count("samestep: the run may hang: rank(s) 0 have called more collectives") == 1


def test_rank_0_whose_output_the_launcher_shows_prints_what_another_rank_has_found(capfd):
    store = dist.HashStore()
    watches = [process_group.HangWatch(store, rank, 3, "gloo", lambda: None) for rank in range(3)]
    counts = {0: 40, 1: 39, 2: 40}

    def reported(rank):
        watches[rank]._report(report(rank, None, line=f"train.py:2{rank}", world=counts[rank]))
        return capfd.readouterr().err.count("samestep: the run may hang: rank(s) 0, 2 have called more collectives")

    try:
        # rank 1 is the first to report, so it reads the reports of the others
        assert [reported(rank) for rank in (1, 2, 0, 1, 2, 0, 1)] == [0, 0, 0, 1, 0, 1, 0]
        watches[1]._withdraw()
        assert store.get("hang/notice") == b""
        watches[0]._withdraw()  # nor does it print the notice again
        assert reported(0) == 0
    finally:
        for watch in watches:
            watch.stop()


def test_a_report_that_is_withdrawn_while_it_is_read_does_not_keep_the_reader():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    watches = [process_group.HangWatch(store, rank, 2, "gloo", lambda: True) for rank in range(2)]
    for watch, rank in zip(watches, range(2), strict=True):
        watch._report(report(rank, True, world=40))
    keys = [f"hang/report/{rank}" for rank in range(2)]
    assert store.check(keys)  # as the reader does
    for watch in watches:
        watch.stop()  # withdraws
    assert store.multi_get(keys) == [b"", b""]
    assert watches[0]._read_reports() == []


# Over gloo, as if it were NCCL: the ranks call a collective without waiting for it, and rank 0 says that its GPU waits.
SLEEPS = """
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from samestep import Run
    from samestep.distributed.process_group import HangWatch

    with Run(global_batch=4, folder="runs/hang") as run:
        run.log({"loss": 1.0})
        run._lifecycle.context.flush_metrics("the test")
        print("not flushed by", run.rank)
        group = dist.new_group(timeout=timedelta(seconds=2))
        close = run._lifecycle.close_after_hang
        watch = HangWatch(run._comm.store, run.rank, 3, "gloo", lambda: run.rank != 1, close)
        dist.all_reduce(torch.ones(1))  # with a long timeout: on a busy machine ranks come seconds apart
        if run.rank == 1:
            time.sleep(200)  # the cause
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        time.sleep(300)
"""


RECORDER = {"on": {}, "off": {"TORCH_FR_BUFFER_SIZE": "0"}}
WAITED = r"(exit code 1|ended by the launcher after an exception), it had waited until the timeout"


@pytest.mark.slow
def test_the_report_of_a_hang_begins_with_the_rank_that_did_not_come(tmp_path):
    """Without the flight recorder only the ranks find the cause; with it, so does the launcher, which may end them."""
    for name in RECORDER:
        (tmp_path / name).mkdir()
    started = {
        name: start(tmp_path / name, SLEEPS, "--nproc-per-node", "3", "train.py", env=variables)
        for name, variables in RECORDER.items()
    }
    ended = {name: each.finish(200) for name, each in started.items()}
    for name, each in ended.items():
        assert each.code == 1, each.err
        assert not each.left
        assert json.loads((tmp_path / name / "runs/hang/summary.json").read_text())["status"] == "failed"
        for rank in range(3):
            assert f"not flushed by {rank}" in next((tmp_path / name).rglob(f"rank-{rank}.out")).read_text()
    assert "is holding up" not in ended["off"].err
    _check_report_of_ranks(ended["off"])
    if re.search(ENDED, ended["on"].err):
        _check_report_of_launcher(ended["on"])
    else:  # on a busy machine the launcher may look after the two seconds of the timeout
        _check_report_of_ranks(ended["on"])


FAILED = "samestep: 3 of 3 rank[(]s[)] on .* failed; "
ENDED = "samestep: 3 of 3 rank[(]s[)] on .* ended because of it; "


def _check_report_of_ranks(ended):
    _, cause, *victims = _table(ended, FAILED)
    assert cause == "rank 1 exit code 1  <- first failure", ended.err
    assert len(victims) == 2
    for rank, victim in zip((0, 2), sorted(victims), strict=True):
        assert re.fullmatch(rf"rank {rank} {WAITED}", victim), ended.err
    assert "rank 1 is at train.py:" in next(ended.folder.rglob("rank-0.err")).read_text()
    _check_traceback_of_rank_1(ended)


def _check_report_of_launcher(ended):
    before, cause, *victims = _table(ended, ENDED)
    summary = before[before.rindex("samestep: rank 1 is holding up the other 2 ranks for ") :]
    assert re.search(r"\n  rank 1 .* it is at train\.py:\d+: time\.sleep\(200\)", summary), ended.err
    assert cause in ("rank 1 exit code 1  <- the cause", "rank 1 ended by the launcher  <- the cause"), ended.err
    for rank, victim in zip((0, 2), victims, strict=True):
        assert re.fullmatch(rf"rank {rank} victim: ({WAITED}|ended by the launcher while it waited)", victim), ended.err
    if "exit code 1" in cause:  # it ended itself before the launcher did
        _check_traceback_of_rank_1(ended)


def _check_traceback_of_rank_1(ended):
    report = ended.err[ended.err.rindex("\nrank 1 on ") :].splitlines()
    assert "    time.sleep(200)  # the cause" in report, ended.err
    assert ": rank 1 has not called a collective in which 2 other rank(s) have waited for" in report[-1], ended.err


def _table(ended, header):
    """What the launcher has printed before the table of ranks, and its rows without the process ids."""
    parts = re.split(header, ended.err)
    assert len(parts) == 2, ended.err
    before, table = parts
    rows = re.findall(r"^  (rank \d+) +pid \d+ +(.*)$", table, re.M)
    return [before, *(" ".join(row) for row in rows)]
