"""`samestep report` and `samestep runs` on folders that are not as expected: one line that says what to do."""

import json
import os
import threading

import pytest

from samestep.cli.main import main
from tests.report.run_folders import event, losses, start, write_lines, write_run

FINISHED = event("end", 90, status="finished", steps=90)


@pytest.fixture
def samestep(capsys):
    """`samestep("report", folder)` runs a command in this process; returns its exit code, and what it prints."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "first", [start(), FINISHED], losses(range(5)))


def test_the_page_is_written_into_the_folder_of_the_run_or_the_current_one(samestep, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = samestep("report", "first")
    assert (code, err) == (0, "")
    assert out.startswith("first: Finished after 90 steps in 1 min 30 s.\nreport: ")
    assert (run / "report.html").is_file()
    assert samestep("report", run, run)[0] == 0
    assert (tmp_path / "report.html").is_file()


def test_a_file_that_cannot_be_written_is_one_line(samestep, run, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "report.html"
    code, _, err = samestep("report", run, "--out", out)
    reason = "a file is where a folder is needed: choose another folder"
    assert (code, err) == (
        2,
        f"samestep: the page {out} cannot be written ({reason}); --out writes it to another file\n",
    )
    assert samestep("report", run, "--out", tmp_path)[0] == 2


def test_a_link_is_followed_and_a_pipe_is_not_replaced(samestep, run, tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    assert samestep("report", run, "--out", tmp_path / "link.html")[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").read_text().startswith("<!doctype html>")
    os.mkfifo(tmp_path / "pipe")
    received = list[str]()
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert samestep("report", run, "--out", tmp_path / "pipe")[0] == 0
    reader.join()
    assert received[0].startswith("<!doctype html>")
    assert (tmp_path / "pipe").is_fifo()


def test_a_name_that_is_a_path_upwards_is_that_of_the_folder(samestep, run, tmp_path, monkeypatch):
    (run / "logs").mkdir()
    monkeypatch.chdir(run / "logs")
    code, out, _ = samestep("report", "..", "--out", tmp_path / "report.html")
    assert code == 0
    assert out.startswith("first: Finished")


def test_what_is_no_metrics_file_is_one_line(samestep, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("step,loss\n1,2\n")
    code, _, err = samestep("report", tmp_path)
    assert code == 2
    assert err.startswith(f"samestep: {tmp_path}/metrics.jsonl, line 1 is not a record like ")


def test_events_that_other_programs_have_written_are_left_out(samestep, run):
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "start"}\n{"time": 3}\n{"event": 7, "time": 8}\n[]\n{"event": "new", "time": 5}\n\xff\n')
        file.write(
            b'{"event": "code", "time": 6, "commit": "a1b2"}\n'
            b'{"event": "checkpoint", "time": 6}\n{"event": "model", "time": 7, "model": "Net"}\n'
        )
    with (run / "times.jsonl").open("ab") as file:
        file.write(b'{"step": 3}\n{"step": 4, "time": 5, "steps": 1, "seconds": "x", "phases": []}\n')
    write_lines(run / "logs" / "launcher-a.jsonl", [{"event": "failure"}, {"event": "hang", "time": 9}])
    code, out, err = samestep("report", run)
    assert (code, err) == (0, "")
    assert out.startswith("first: Finished after 90 steps in 1 min 30 s.\n")


DAMAGED = (
    '{"step": 1, "time": 1, "a": null, "infinite": {"a": "nan"}}',
    '{"event": "end", "time": 1e300, "status": "failed", "steps": 3}',
    "[" * 100_000,
    "\0\0",
)


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "times.jsonl"])
def test_a_damaged_line_does_not_take_the_page_away(samestep, run, name, line):
    with (run / name).open("a") as file:
        file.write(line + "\n")
    assert samestep("report", run)[::2] == (0, "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("times.jsonl", {"step": 1, "time": 2, "steps": 1, "seconds": 1, "phases": {"forward": {}}}),
        ("events.jsonl", {"event": "checkpoint", "time": 1767225600, "checkpoint": "a", "step": 1, "bytes": 1,
                          "seconds": 1, "waited_seconds": 1, "metric": 7}),
    ],
)  # fmt: skip
def test_values_of_other_types_are_one_line_and_other_runs_are_listed(samestep, run, tmp_path, name, line):
    other = write_run(tmp_path / "other", [start(), FINISHED], losses(range(5)))
    with (other / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    code, _, err = samestep("report", other)
    assert code == 2
    assert err.startswith(f"samestep: {other} has a record that samestep ")
    code, out, _ = samestep("runs", tmp_path)
    assert code == 0
    assert "first" in out


def test_a_run_is_listed_once_however_often_it_was_launched(samestep, tmp_path, monkeypatch):
    out = write_run(tmp_path / "lab" / "out", [start(), FINISHED], losses(range(5)))
    for name in ("train-1", "train-2"):
        write_lines(tmp_path / "lab" / "runs" / name / "logs" / "launcher-a.jsonl", [event("launch", 0, ranks=2)])
        (tmp_path / "lab" / "runs" / name / "run").symlink_to(out)
    monkeypatch.chdir(tmp_path / "lab")
    for folder in (".", "runs"):
        code, text, _ = samestep("runs", folder)
        assert code == 0
        rows = [line.split()[:2] for line in text.splitlines() if "finished" in line]
        assert rows == [["out", "finished"]]
    assert len(json.loads(samestep("runs", "--json")[1])) == 1


def test_a_run_that_has_ended_is_listed_with_its_summary_as_with_its_curves(samestep, tmp_path):
    metrics = [*losses(range(90)), {"step": 89, "epoch": 8, "time": 0.0, "test/accuracy": 0.5}]
    last = {"train/loss": 1 / 90, "test/accuracy": 0.5}
    write_run(tmp_path / "a", [start(), FINISHED], metrics)
    write_run(tmp_path / "b", [start(), FINISHED], metrics, summary={"metrics": last, "steps": 90})
    rows = json.loads(samestep("runs", tmp_path, "--json")[1])
    one, other = ({key: value for key, value in row.items() if key not in ("name", "folder")} for row in rows)
    assert one == other
    assert other["metrics"] == last
    (tmp_path / "b" / "metrics.jsonl").write_text("")  # it is not read for a list
    assert json.loads(samestep("runs", tmp_path, "--json")[1])[1]["metrics"] == last


def test_folders_that_cannot_be_read_are_named_and_the_others_are_listed(samestep, run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("step,loss\n")
    code, out, err = samestep("runs", tmp_path)
    assert code == 0
    assert "first" in out
    assert err.startswith(f"samestep: {tmp_path}/other/metrics.jsonl, line 1 is not a record like ")
