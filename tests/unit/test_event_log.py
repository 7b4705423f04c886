"""Events and times of a run: nothing is lost before its folder is known, lines are strict JSON, cut ones skipped."""

import json
import threading

from samestep.loggers.run_files import EVENTS_FILE, LONGEST_TEXT, TIMES_FILE, EventLog, end_of_text, read_records


def test_records_wait_for_the_folder_and_then_are_written_at_once(tmp_path):
    log = EventLog(clock=lambda: 1.23456)
    log.record("start", {"ranks": 2})
    assert log.is_waiting
    log.open(tmp_path)
    assert not log.is_waiting
    assert (tmp_path / EVENTS_FILE).read_text() == '{"event": "start", "time": 1.235, "ranks": 2}\n'
    assert not (tmp_path / TIMES_FILE).exists()
    log.record_times(7, {"steps": 3})
    assert list(read_records(tmp_path / TIMES_FILE)) == [{"step": 7, "time": 1.235, "steps": 3}]
    log.close()
    log.record("end", {})
    assert len(list(read_records(tmp_path / EVENTS_FILE))) == 1


def test_numbers_that_json_lacks_are_null_and_unknown_objects_text(tmp_path):
    log = EventLog(clock=lambda: 0.0)
    log.record("checkpoint", {"metric": ("loss", float("nan")), "seen": {"a": float("inf")}, "folder": tmp_path})
    log.open(tmp_path)
    (record,) = read_records(tmp_path / EVENTS_FILE)
    assert record["metric"] == ["loss", None]
    assert record["seen"] == {"a": None}
    assert record["folder"] == str(tmp_path)


def test_a_line_that_a_kill_has_cut_off_is_skipped_and_the_next_start_continues(tmp_path):
    (tmp_path / EVENTS_FILE).write_bytes(b'{"event": "start", "time": 1}\n{"event": "end", "ti')
    log = EventLog(clock=lambda: 2.0)
    log.record("start", {})
    log.open(tmp_path)
    assert [each["time"] for each in read_records(tmp_path / EVENTS_FILE)] == [1, 2.0]
    (tmp_path / EVENTS_FILE).write_bytes(b"[1]\n\0\0\0\nnot json\n")
    assert list(read_records(tmp_path / EVENTS_FILE)) == []
    assert list(read_records(tmp_path / "missing")) == []


def test_threads_may_record_at_the_same_time(tmp_path):
    log = EventLog()
    log.open(tmp_path)
    threads = [
        threading.Thread(target=lambda: [log.record("warning", {"text": "x" * 500}) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines()
    assert len(lines) == 200
    assert all(json.loads(line)["event"] == "warning" for line in lines)


def test_a_full_disk_is_a_warning_that_is_no_event_of_its_own(tmp_path):
    warnings = []
    log = EventLog(warn=lambda text: (warnings.append(text), log.record("warning", {"text": text})))
    (tmp_path / EVENTS_FILE).mkdir()  # cannot be opened for writing
    log.open(tmp_path)
    log.record("start", {})
    assert len(warnings) == 1
    assert EVENTS_FILE in warnings[0]


def test_of_a_long_text_the_end_is_kept():
    assert end_of_text("short") == "short"
    assert end_of_text("a" * LONGEST_TEXT + "end").endswith("aaend")
    assert len(end_of_text("a" * 10 * LONGEST_TEXT)) < LONGEST_TEXT + 10
