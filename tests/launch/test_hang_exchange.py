"""Launchers exchange what they know about a hang through the store, and answer users through files."""

import os
import threading
import time
from datetime import timedelta

from torch.distributed import HashStore, TCPStore

from samestep.launch.hang_exchange import BoundedThread, HangFolder, LauncherInfo, NodeInfo, NodeStore
from tests.launch.launched import wait_for

GENEROUS = 120.0  # seconds, only to detect a test that hangs


def test_operations_that_two_threads_request_at_the_same_time_are_both_performed(monkeypatch):
    """The launcher reads logs when a rank fails, while its watch may write a report."""
    monkeypatch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", GENEROUS)
    files, release = BoundedThread("files"), threading.Event()
    found = dict[str, object]()
    try:
        first = threading.Thread(target=lambda: found.update(first=files.call(lambda: release.wait(GENEROUS))))
        first.start()
        wait_for(files._is_busy.is_set, GENEROUS)
        second = threading.Thread(target=lambda: found.update(second=files.call(lambda: "second")))
        second.start()
        assert found == {}
        release.set()
        first.join()
        second.join()
        assert found == {"first": True, "second": "second"}
    finally:
        release.set()
        files.close()


def test_an_operation_that_hangs_keeps_no_thread_for_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", 0.1)
    files, release = BoundedThread("files"), threading.Event()
    try:
        assert files.call(lambda: release.wait(GENEROUS)) is None
        assert files.call(lambda: "not performed") is None
        release.set()
        wait_for(lambda: files.call(lambda: "performed") == "performed", GENEROUS)
    finally:
        release.set()
        files.close()


def test_launchers_ask_and_answer_through_the_store_and_count_requests_once_per_second():
    operations = []

    class CountingStore(HashStore):
        def add(self, key, amount):
            operations.append(key)
            return super().add(key, amount)

        def check(self, keys):
            operations.append(keys)
            return super().check(keys)

    store = CountingStore()
    first, second = (NodeStore(store, "hang/0", node, 2) for node in range(2))
    try:
        second.introduce(NodeInfo("gpu-08", [2, 3]))
        assert first.read_nodes() == {1: NodeInfo("gpu-08", [2, 3])}
        operations.clear()
        assert first.new_requests() == []
        assert len(operations) == 1  # of a healthy run
        number = first.request("look")
        (request,) = second.new_requests()
        assert (request.number, request.kind) == (number, "look")
        second.answer(number, [{"rank": 2}])
        assert first.answers(number, GENEROUS) == {1: [{"rank": 2}]}
        assert second.new_requests() == []
        assert first.answers(first.request("look"), 0.3) == {}  # a launcher that does not answer
    finally:
        first.close()
        second.close()


def test_a_store_that_does_not_answer_does_not_keep_the_launcher(monkeypatch):
    release = threading.Event()

    class SilentStore(HashStore):
        def add(self, key, amount):
            release.wait(GENEROUS)
            return 1

    monkeypatch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", 0.1)
    nodes = NodeStore(SilentStore(), "hang/0", 0, 2)
    try:
        assert nodes.request("look") is None
        assert nodes.new_requests() == []
        assert nodes.get("anything") is None  # the operation before still waits
    finally:
        release.set()
        nodes.close()


def test_a_request_whose_number_the_store_returned_too_late_is_read_and_one_without_a_text_is_skipped(monkeypatch):
    class SlowStore(HashStore):
        is_slow = False

        def add(self, key, amount):
            if self.is_slow and amount:
                time.sleep(1.0)
            return super().add(key, amount)

    store = SlowStore()
    first, second = (NodeStore(store, "hang/0", node, 2) for node in range(2))
    try:
        with monkeypatch.context() as patch:
            patch.setattr("samestep.launch.hang_exchange._WAIT_SECONDS", 0.1)
            store.is_slow = True
            assert first.request("look") is None
        store.is_slow = False
        wait_for(lambda: first.request("look") is not None, GENEROUS)
        assert [request.kind for request in second.new_requests()] == ["look", "look"]
        store.add("hang/0/requests", 1)  # by a launcher that has ended since
        number = first.request("end", {"a": 1})
        found = []
        wait_for(lambda: bool(found.extend(second.new_requests()) or found), GENEROUS)
        assert [(request.number, request.kind, request.value) for request in found] == [(number, "end", {"a": 1})]
    finally:
        first.close()
        second.close()


def test_a_wait_is_in_the_store_only_while_it_lasts_and_answers_are_deleted():
    store = HashStore()
    first, second = (NodeStore(store, "hang/0", node, 2) for node in range(2))
    try:
        second.set_wait(None)
        assert store.num_keys() == 0  # a healthy run writes nothing
        second.set_wait({"seconds": 21.0})
        second.set_wait({"seconds": 22.0})
        assert first.waits() == [{"seconds": 22.0}]
        second.set_wait(None)
        assert first.waits() == []
        number = first.request("look")
        second.answer(number, ["megabytes"])
        assert first.answers(number, GENEROUS) == {1: ["megabytes"]}
        assert not store.check([f"hang/0/answer/{number}/1"])
    finally:
        first.close()
        second.close()


def test_a_store_whose_host_is_gone_is_a_node_that_does_not_answer():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    nodes = NodeStore(client, "hang/0", 1, 2)
    try:
        assert nodes.request("look") == 1
        del server
        assert nodes.request("look") is None
        assert nodes.get("cause") is None
    finally:
        nodes.close()


def test_a_user_asks_through_files(tmp_path):
    launcher, user = HangFolder(tmp_path), HangFolder(tmp_path)
    assert user.launcher() is None
    launcher.open(LauncherInfo.of_this_process(0, "gpu-07"))
    found = user.launcher()
    assert found.is_local
    assert (found.pid, found.has_ended) == (os.getpid(), False)

    def answer():
        wait_for(lambda: bool(launcher.requests()), GENEROUS)
        launcher.answer(launcher.requests()[0], {"text": "no rank waits"})

    thread = threading.Thread(target=answer)
    thread.start()
    assert user.ask(GENEROUS, lambda: True) == {"text": "no rank waits"}
    thread.join()
    assert user.ask(0.2, lambda: True) is None
    assert user.ask(GENEROUS, lambda: False) is None  # the launcher ends
    assert [path.name for path in (tmp_path / "hang").iterdir()] == ["launcher.json"]
    launcher.close()
    assert user.launcher().has_ended


def test_a_launcher_whose_node_has_another_number_after_a_restart_leaves_no_file_of_the_earlier_one(tmp_path):
    folder = HangFolder(tmp_path)
    for node in (0, 1):
        folder.open(LauncherInfo.of_this_process(node, "gpu-07"))
    assert [path.name for path in folder.path.iterdir()] == ["launcher-1.json"]


def test_the_first_launcher_of_a_folder_removes_old_requests_and_a_restart_keeps_new_ones(tmp_path):
    folder = HangFolder(tmp_path)
    folder.path.mkdir()
    old, new = folder.path / "request-old", folder.path / "request-new"
    for left in (old, folder.path / "answer-old"):
        left.touch()
    HangFolder(tmp_path).open(LauncherInfo.of_this_process(1, "gpu-07"))  # nodes may share the folder
    assert old.exists()
    folder.open(LauncherInfo.of_this_process(0, "gpu-07"))
    assert sorted(path.name for path in folder.path.iterdir()) == ["launcher-1.json", "launcher.json"]
    new.touch()
    folder.open(LauncherInfo.of_this_process(0, "gpu-07"))  # the ranks have been restarted
    assert folder.requests() == ["new"]


def test_reports_are_numbered_per_attempt(tmp_path):
    folder = HangFolder(tmp_path)
    folder.open(LauncherInfo.of_this_process(0, "gpu-07"))
    paths = [folder.write_report(attempt, "text", {"a": 1}) for attempt in (0, 0, 1)]
    assert [path.name for path in paths] == ["report-0-1.txt", "report-0-2.txt", "report-1-1.txt"]
    assert all(path.with_suffix(".json").exists() for path in paths)
