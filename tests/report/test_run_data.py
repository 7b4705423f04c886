"""The state of a run from its folder: finished, failed, killed, preempted, running; and folders without a run."""

import json
import os
from socket import gethostname

import pytest

from samestep.environment.processes import seconds_from_boot
from samestep.errors import ReportError
from samestep.report.run_data import read_run
from samestep.report.verdict import active_seconds, describe_run, failures, rank_hours, steps_done
from tests.report.run_folders import BEGIN, event, losses, running, start, times, write_lines, write_run

FINISHED = event("end", 90, status="finished", steps=90)


def test_a_finished_run(tmp_path):
    run = read_run(write_run(tmp_path / "first", [start(), FINISHED], losses(range(90))))
    assert run.name == "first"
    verdict = describe_run(run)
    assert (verdict.status, verdict.text) == ("finished", "Finished after 90 steps in 1 min 30 s.")
    assert verdict.is_good
    assert (steps_done(run), active_seconds(run)) == (90, 90)
    assert rank_hours(run) == pytest.approx(2 * 90 / 3600)


def test_a_run_that_was_killed_and_resumed_on_other_ranks(tmp_path):
    events = [start(), start(100, ranks=1), event("restored", 101, checkpoint="out/step-40", step=40, corrupt=[]),
              event("end", 130, status="finished", steps=70)]  # fmt: skip
    run = read_run(write_run(tmp_path, events, losses(range(60))))
    assert [each.status for each in run.starts] == ["killed", "finished"]
    assert run.last.first_step == 40
    assert [each.until - BEGIN for each in run.starts] == [59, 130]  # the first one ended with its last record
    assert describe_run(run).text == (
        "Finished after 70 steps in 1 min 29 s. Before, it was killed; it resumed on 1 rank instead of 2."
    )


def test_the_end_of_a_killed_start_is_its_last_record(tmp_path):
    run = read_run(write_run(tmp_path, [start()], losses(range(31)), [times(29, 30.5)]))
    assert run.last.until == BEGIN + 30.5
    verdict = describe_run(run)
    assert verdict.status == "killed"
    assert verdict.text == (
        "Killed after 31 steps in 30 s. Rank 0 wrote no end: it was killed, ran out of memory, or its node went down."
    )


def test_a_failed_run_has_the_cause_of_the_launcher_or_else_that_of_rank_0(tmp_path):
    end = event("end", 9, status="failed", steps=8, error="RankMissing: rank 1 has failed", traceback="Traceback ...")
    alone = read_run(write_run(tmp_path / "alone", [start(), end]))
    assert describe_run(alone).text == "Failed after 8 steps in 9.0 s. RankMissing: rank 1 has failed"
    assert [each.report for each in failures(alone)] == ["Traceback ..."]
    failure = event(
        "failure", 11, cause="rank 1: ValueError: bad sample 7", report="rank 1 failed first\n...", logs="/l"
    )
    launched = read_run(write_run(tmp_path / "launched", [start(), end], launches=[failure]))
    assert describe_run(launched).text == "Failed after 8 steps in 9.0 s. rank 1: ValueError: bad sample 7"
    assert [each.logs for each in failures(launched)] == ["/l"]


def test_how_earlier_starts_ended_is_part_of_the_verdict(tmp_path):
    def preempted(seconds):
        return [start(seconds), event("end", seconds + 5, status="preempted", steps=9)]

    events = [*preempted(0), *preempted(10), start(20), start(30), event("end", 40, status="finished", steps=70)]
    text = describe_run(read_run(write_run(tmp_path, events))).text
    assert text == (
        "Finished after 70 steps in 20 s. Before, it was preempted 2 times and was killed; it started again."
    )


def test_a_preempted_and_a_stopped_run(tmp_path):
    events = [start(), event("preempted", 8, cause="SIGTERM", saved=["step-80"], steps=80),
              event("end", 9, status="preempted", steps=80)]  # fmt: skip
    preempted = describe_run(read_run(write_run(tmp_path / "a", events)))
    assert preempted.status == "preempted"
    assert preempted.text == "Preempted by SIGTERM after 80 steps in 9.0 s. Start it again to resume."
    stopped = describe_run(read_run(write_run(tmp_path / "b", [start(), event("end", 9, status="stopped", steps=5)])))
    assert stopped.text == "Stopped by a signal after 5 steps in 9.0 s; nothing was saved."


def test_a_run_is_running_while_its_process_is_and_a_silent_one_on_another_host_has_ended(tmp_path):
    live = read_run(write_run(tmp_path / "live", [running()], losses(range(5))))
    assert describe_run(live).text == "Running: 5 steps in 4.0 s so far."
    elsewhere = read_run(write_run(tmp_path / "far", [start(host="gpu-99", pid=os.getpid())], losses(range(5))))
    assert describe_run(elsewhere).status == "killed"


def test_only_metrics_of_an_older_version_can_be_read_and_its_summary_says_how_it_ended(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", losses(range(3)))
    run = read_run(tmp_path)
    assert list(run.curves) == ["train/loss"]
    assert describe_run(run).status == "unknown"
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "steps": 3}))
    assert describe_run(read_run(tmp_path)).text == (
        "Failed after 3 steps. Only its metrics are known: events.jsonl is damaged, or an older version of samestep "
        "has written them."
    )


def launched(folder, *events, **fields):
    begin = [event("launch", 0, command=["plain.py"], ranks=2, **fields), event("attempt", 1, attempt=0, world_size=2)]
    write_lines(folder / "logs" / f"launcher-{gethostname()}.jsonl", [*begin, *events])
    return read_run(folder)


def test_a_script_without_a_run_has_the_events_of_its_launcher(tmp_path):
    run = launched(tmp_path, event("end", 31, code=0))
    assert describe_run(run).text == (
        "Finished after 30 s. The script has not created a Run, so only what its launcher saw is known."
    )
    assert [(each.ranks, each.status) for each in run.attempts] == [(2, "finished")]
    assert rank_hours(run) == pytest.approx(60 / 3600)
    assert describe_run(launched(tmp_path, event("end", 30, code=3))).text == "Failed with exit code 3."
    assert describe_run(launched(tmp_path)).status == "killed"


def test_a_script_without_a_run_is_running_as_long_as_its_launcher_is(tmp_path):
    process = {"pid": os.getpid(), "started_from_boot": seconds_from_boot(os.getpid())}
    assert describe_run(launched(tmp_path, **process)).text.startswith("Running for 0 s so far. The script has not ")


def test_the_folder_of_a_launcher_leads_to_that_of_the_run(tmp_path):
    out = write_run(tmp_path / "out", [start(launcher_folder=str(tmp_path / "launched")), FINISHED])
    write_lines(tmp_path / "launched" / "logs" / "launcher-gpu-07.jsonl", [event("launch", 0, ranks=2)])
    (tmp_path / "launched" / "run").symlink_to(out)
    run = read_run(tmp_path / "launched")
    assert run.folder == out
    assert [each["event"] for each in run.launches] == ["launch"]
    assert [each["event"] for each in read_run(out).launches] == ["launch"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "does not exist: pass the folder of a run, such as runs/train-20260131-093005"),
        (lambda path: path.write_text(""), "is a file: pass the folder of a run, such as "),
        (lambda path: path.mkdir(), "is not the folder of a run: it has neither events.jsonl nor metrics.jsonl"),
    ],
)
def test_what_is_no_run_is_an_error(tmp_path, prepare, message):
    prepare(tmp_path / "other")
    with pytest.raises(ReportError, match=message):
        read_run(tmp_path / "other")


def test_lines_that_are_no_records_are_skipped(tmp_path):
    write_run(tmp_path, [start(), FINISHED])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "warning", "time": 1')
    assert describe_run(read_run(tmp_path)).status == "finished"
