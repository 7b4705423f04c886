"""What a launcher learns about real processes: where they are, also if they cannot answer."""

import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from samestep.hang import evidence as hang_evidence
from samestep.hang import node_evidence, rank_probe
from samestep.hang.evidence import Frame, is_samestep, is_user_code, read_evidence, user_frame
from samestep.hang.node_evidence import FOLDER, NodeProbe, match_gpus, read_tail
from samestep.hang.process_stacks import StackFile
from tests.hang.probed import ENDLESS, place
from tests.launch.launched import wait_for
from tests.small_disk import small_disk

STARTUP = str(Path(rank_probe.__file__).parent / "startup")


def stop(process):
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 120)


def test_the_line_of_a_process_that_sleeps(processes):
    process = processes.start("def work():\n    ready()\n    time.sleep(100)\nwork()")
    evidence = processes.collect(process)
    assert place(evidence.process.stacks["main"]) == "script0.py:4 work"
    assert list(evidence.process.stacks) == ["main"]  # not the probe's own thread
    assert (evidence.rank, evidence.process.pid, evidence.process.state) == (0, process.pid, "sleeping")
    assert evidence.process.cpu_seconds < 0.3 <= evidence.process.window
    assert evidence.process.command.endswith("script0.py")
    assert evidence.collectives == []
    assert evidence.exit_code is None
    assert evidence.oom_kills == 0
    assert read_evidence(evidence.to_json()) == evidence


def test_threads_have_their_names(processes):
    process = processes.start(
        """
        import threading
        def wait():
            ready()
            time.sleep(100)
        threading.Thread(target=wait, name="loader", daemon=True).start()
        time.sleep(100)
        """
    )
    stacks = processes.collect(process).process.stacks
    (loader,) = [stack for name, stack in stacks.items() if name.startswith("loader 0x")]
    assert place(loader) == "script0.py:5 wait"
    assert place(stacks["main"]) == "script0.py:7 <module>"


def test_a_process_that_computes_uses_the_cpu(processes):
    evidence = processes.collect(processes.start("ready()\nwhile True:\n    pass"))
    assert evidence.process.cpu_seconds > 0
    assert place(evidence.process.stacks["main"]) in ("script0.py:3 <module>", "script0.py:4 <module>")


@pytest.mark.slow
def test_native_code_that_holds_the_gil(processes):
    process = processes.start(f"import re\nready()\n{ENDLESS}")
    wait_for(lambda: processes.probe.progress(process.pid, 0.3) is None, 120)
    evidence = processes.collect(process)
    assert evidence.collectives is None  # it does not answer
    assert place(evidence.process.stacks["main"]) == "script0.py:4 <module>"
    assert len(evidence.process.stacks) == 1
    again = processes.collect(process)  # the file contains both
    assert again.process.stacks == evidence.process.stacks


def test_a_stopped_process(processes):
    process = processes.start("ready()\ntime.sleep(100)")
    stop(process)
    evidence = processes.collect(process)
    assert (evidence.process.state, evidence.process.stacks, evidence.collectives) == ("stopped", {}, None)
    assert processes.probe.progress(process.pid, 0.1) is None
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: processes.collect(process).process.state == "sleeping", 120)


def test_a_process_that_is_stopped_for_a_moment_is_not_stopped(processes, monkeypatch):
    """As by `py-spy dump`."""
    process = processes.start("ready()\ntime.sleep(100)")
    finish = node_evidence._Processes.finish

    def stop_and_finish(self):
        stop(process)
        finish(self)

    monkeypatch.setattr(node_evidence._Processes, "finish", stop_and_finish)
    assert processes.collect(process).process.state == "sleeping"
    assert processes.collect(process).process.state == "stopped"


def test_a_rank_that_only_misses_the_first_request_gets_no_signal(processes, monkeypatch):
    process = processes.start("ready()\ntime.sleep(100)")
    wait_for((processes.probe.folder / f"{process.pid}.sock").exists, 120)
    requested, ask = [], NodeProbe._ask

    def miss_first(self, requests, seconds):
        requested.append(list(requests))
        return ask(self, requests, 60) if len(requested) > 1 else {}

    monkeypatch.setattr(NodeProbe, "_ask", miss_first)
    stacks = processes.collect(process).process.stacks
    assert place(stacks["main"]) == "script0.py:3 <module>"
    assert requested == [[process.pid]] * 2
    file = StackFile(process.pid)
    assert file._begin == len(file._path.read_text().split("\n")[0]) + 1  # there is nothing after the first line


def test_processes_that_have_ended(processes):
    process = processes.start("ready()\nraise SystemExit(3)")
    wait_for(lambda: processes.collect(process).process.state == "zombie", 120)  # the launcher has not collected it
    assert processes.collect(process).exit_code == 3
    process.wait()
    assert processes.collect(process).process.state == "gone"
    (evidence,) = processes.probe.collect({4: process.pid}, {}, {4: -9})
    assert (evidence.rank, evidence.exit_code, evidence.process.state) == (4, -9, "gone")
    assert not processes.probe.end(process.pid)


def test_a_data_worker_that_has_died_is_known_by_its_name_and_exit_code(processes):
    process = processes.start(
        """
        import ctypes, os
        if not os.fork():
            ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)  # PR_SET_NAME
            os._exit(3)
        ready()
        time.sleep(100)
        """
    )
    wait_for(lambda: [each.state for each in processes.collect(process).children] == ["zombie"], 120)
    (child,) = processes.collect(process).children
    assert (child.is_data_worker, child.parent, child.exit_code) == (True, process.pid, 3)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_have_their_own_stacks(processes, method):
    process = processes.start(
        f"""
        import multiprocessing
        def work():
            ready()
            time.sleep(100)
        if __name__ == "__main__":
            child = multiprocessing.get_context({method!r}).Process(target=work)
            child.start()
            child.join()
        """
    )
    evidence = processes.collect(process)
    assert place(evidence.process.stacks["main"]) == "script0.py:9 <module>"
    stacks = [each.stacks["main"] for each in evidence.children if "main" in each.stacks]
    places = [place(stack) for stack in stacks if any(frame.function == "work" for frame in stack)]
    assert places == ["script0.py:5 work"]
    assert processes.probe.progress(process.pid) is not None  # the thread is there after the fork


def test_a_child_that_is_not_python(processes):
    process = processes.start("import subprocess\nready()\nsubprocess.run(['sleep', '100'])")
    wait_for(lambda: processes.collect(process).children, 120)
    (child,) = processes.collect(process).children
    assert (child.command, child.stacks, child.state) == ("sleep 100", {}, "sleeping")


def test_the_collectives_of_a_process_that_a_rank_starts(processes):
    """If the rank is a wrapper, its child answers."""
    script = "import pathlib, time; pathlib.Path('child').touch(); time.sleep(100)"
    process = processes.start(f"import subprocess, sys\nready()\nsubprocess.run([sys.executable, '-c', {script!r}])")
    wait_for((processes.folder / "child").exists, 120)
    evidence = processes.collect(process)
    assert evidence.children[0].stacks["main"][0].file == "<string>"
    assert evidence.collectives == []


@pytest.mark.slow
def test_a_script_with_its_own_handler_gets_no_signal(processes):
    process = processes.start(
        f"""
        import ctypes, pathlib, signal
        signal.signal({rank_probe.SIGNAL}, lambda number, frame: pathlib.Path("handled").touch())
        ready()
        while not pathlib.Path("hold").exists():
            time.sleep(0.01)
        ctypes.PyDLL(None).usleep(4_000_000)
        time.sleep(100)
        """
    )
    assert processes.probe.progress(process.pid, 120) is not None
    (processes.folder / "hold").touch()
    wait_for(lambda: processes.probe.progress(process.pid, 0.2) is None, 120)
    assert processes.collect(process).process.stacks == {}
    assert processes.probe.progress(process.pid, 120) is not None
    assert not (processes.folder / "handled").exists()


def test_a_script_that_closes_all_files_gets_no_signal(processes):
    process = processes.start(
        """
        import os
        os.closerange(3, 1000)
        files = [open(f"mine{number}", "w") for number in range(20)]
        ready()
        while not pathlib.Path("end").exists():
            time.sleep(0.01)
        if os.fork() == 0:
            os._exit(0)
        for file in files:
            file.write("mine")
            file.close()
        """
    )
    processes.probe.progress(process.pid)  # the thread still waits at its closed socket
    evidence = processes.collect(process)
    assert (evidence.process.state, evidence.process.stacks) == ("sleeping", {})
    (processes.folder / "end").touch()
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0
    assert {(processes.folder / f"mine{number}").read_text() for number in range(20)} == {"mine"}


def test_a_rank_whose_folder_is_gone_still_shows_its_stacks(processes):
    process = processes.start("ready()\ntime.sleep(100)")
    wait_for((processes.probe.folder / f"{process.pid}.sock").exists, 120)
    processes.probe.close()
    evidence = processes.collect(process)
    assert (evidence.collectives, place(evidence.process.stacks["main"])) == (None, "script0.py:3 <module>")


def test_a_script_that_changes_its_folder(processes):
    process = processes.start(
        """
        import os
        os.chdir("/")
        def work():
            ready()
            time.sleep(100)
        exec(compile("work()", "part.py", "exec"))
        """
    )
    files = {frame.file for frame in processes.collect(process).process.stacks["main"]}
    assert files == {str(processes.folder / "script0.py"), str(processes.folder / "part.py")}


def test_end_flushes_what_was_printed_and_calls_the_registered_functions(processes):
    process = processes.start(
        """
        import sys
        from samestep.hang import rank_probe
        assert rank_probe.is_running() and "samestep" in sys.modules
        rank_probe.at_end(lambda: print("closed"))
        rank_probe.at_end(lambda: 1 / 0)
        rank_probe.at_end(lambda: print("closed first"))
        print("printed")
        ready()
        time.sleep(100)
        """
    )
    assert processes.probe.end(process.pid, seconds=60, exit_code=7)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 7
    printed = [line for line in output.splitlines() if not line.startswith(("Traceback", " "))]
    assert printed == ["printed", "closed first", "ZeroDivisionError: division by zero", "closed"]


def test_end_does_not_wait_for_a_function_that_hangs(processes):
    process = processes.start(
        """
        from samestep.hang import rank_probe
        rank_probe.at_end(lambda: time.sleep(1000))
        ready()
        time.sleep(100)
        """
    )
    assert processes.probe.end(process.pid, seconds=0.1)
    assert process.wait(60) == 1


@pytest.mark.slow
def test_many_ranks_answer_at_the_same_time(processes):
    """One that does not answer does not delay the others: all waits are one."""
    stopped, *others = [processes.start("ready()\ntime.sleep(100)") for _ in range(4)]
    stop(stopped)
    answers = processes.probe.progress_of([stopped.pid, *(process.pid for process in others)], 1.0)
    assert answers.pop(stopped.pid) is None
    assert [answer.calls for answer in answers.values()] == [0, 0, 0]
    found = processes.probe.collect(dict(enumerate([stopped.pid, *answers])), {})
    assert [each.process.state for each in found] == ["stopped", "sleeping", "sleeping", "sleeping"]


def test_the_last_lines_of_a_log(processes, tmp_path):
    log = tmp_path / "rank0.log"
    log.write_bytes(b"old\n" * 5000 + b"caf\xff\nlast\n")
    process = processes.start("ready()\ntime.sleep(100)")
    (evidence,) = processes.probe.collect({0: process.pid}, {0: log})
    assert evidence.last_lines[-2:] == ["caf\ufffd", "last"]
    assert len(evidence.last_lines) == 150
    assert read_tail(tmp_path / "missing") == []


def test_variables_keep_what_the_user_has_set(tmp_path):
    probe = NodeProbe(tmp_path / "short")
    assert probe.variables({}) == {
        "PYTHONPATH": STARTUP,
        FOLDER: str(tmp_path / "short"),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTHONFAULTHANDLER": "1",
    }
    assert probe.variables({"PYTHONPATH": ""})["PYTHONPATH"] == STARTUP  # an empty entry would be the current folder
    own = probe.variables(
        {"PYTHONPATH": f"/a:{STARTUP}:/b", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "PYTHONFAULTHANDLER": ""}
    )
    assert own == {"PYTHONPATH": f"{STARTUP}:/a:/b", FOLDER: str(tmp_path / "short")}
    assert "TORCH_FR_BUFFER_SIZE" not in probe.variables({"TORCH_FR_BUFFER_SIZE": "0"})
    assert stat.S_IMODE((tmp_path / "short").stat().st_mode) == 0o700
    probe.close()
    assert not (tmp_path / "short").exists()


def test_the_folder_is_short_enough_for_a_socket(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    probe = NodeProbe()
    assert len(f"{probe.folder}/{2**22}.sock") < 107
    assert list(long.iterdir()) == []
    probe.close()


def test_gpus_of_ranks():
    gpus = "GPU-a, 100\nGPU-b, 0\nGPU-c, [N/A]\n"
    assert match_gpus(gpus, "17, GPU-b\n18, GPU-a\n", [18, 17, 19]) == {18: 100, 17: 0}
    assert match_gpus(gpus, "9917, GPU-b\n", [17, 18]) == {17: 100, 18: 0}  # host ids in a container
    assert match_gpus(gpus, "", [17, 18, 19]) == {}
    assert match_gpus("", "No devices were found", [17]) == {}


def test_code_of_a_user_next_to_samestep_is_not_samestep():
    folder = Path(hang_evidence.__file__).parent.parent
    assert is_samestep(Frame(f"{folder}/run.py", 1, "f"))
    mine = Frame(f"{folder}_experiments/train.py", 1, "f")
    assert not is_samestep(mine)
    assert is_user_code(mine)


def test_the_line_of_a_program_that_is_an_installed_package():
    packages = "/venv/lib/python3.11/site-packages"
    torch, mine, outer = (
        Frame(f"{packages}/{name}.py", 3, "f") for name in ("torch/nn/modules/linear", "mine/model", "mine/main")
    )
    threads, start = Frame("/usr/lib/python3.11/threading.py", 5, "wait"), Frame("<frozen runpy>", 88, "_run_code")
    assert user_frame([threads, torch, mine, outer, start]) == mine
    assert user_frame([mine, Frame("/home/me/train.py", 1, "f"), start]).file == "/home/me/train.py"
    assert user_frame([threads, torch, start]) == start


@pytest.mark.slow
def test_a_deep_stack_shows_the_innermost_frames(processes):
    code = "import re\ndef dive(depth):\n    if depth:\n        dive(depth - 1)\n    else:\n        ready()\n"
    answered = processes.start(code + "        time.sleep(100)\ndive(900)")
    silent = processes.start(code + f"        {ENDLESS}\ndive(900)")
    wait_for(lambda: processes.probe.progress(silent.pid, 0.3) is None, 120)
    for process, depth in ((answered, 200), (silent, 100)):
        stack = processes.collect(process).process.stacks["main"]
        assert place(stack) == f"{Path(process.args[-1]).name}:8 dive"
        assert len(stack) == depth


def test_memory_devices_and_read_only_images_are_not_full_disks(processes, tmp_path, monkeypatch):
    process = processes.start("file = open('/dev/null', 'w')\nready()\ntime.sleep(100)")
    folders = {*node_evidence._written_folders(process.pid)}
    assert folders == {processes.folder}
    usage = os.statvfs(tmp_path)
    image = SimpleNamespace(f_blocks=100, f_bavail=0, f_frsize=4096, f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda folder: image)
    assert not node_evidence._is_full(tmp_path)
    image.f_flag = usage.f_flag & ~os.ST_RDONLY
    assert node_evidence._is_full(tmp_path)


def test_the_file_system_of_a_rank_is_full(processes, tmp_path):
    with small_disk(tmp_path / "disk", 4096) as disk:
        process = processes.start(f"file = open({str(disk.path / 'log')!r}, 'wb', 0)\nready()\ntime.sleep(100)")
        assert processes.collect(process).full_disk == ""
        disk.fill()
        assert processes.collect(process).full_disk == str(disk.path)


def test_the_cost_of_a_request_does_not_grow_with_files_that_ended_processes_leave(processes):
    """Forked children have no file in the folder, however many a run starts."""
    process = processes.start(
        """
        import os
        for _ in range(50):
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        ready()
        time.sleep(100)
        """
    )
    assert processes.probe.progress(process.pid, 120) is not None
    assert [path.name for path in processes.probe.folder.iterdir()] == [f"{process.pid}.sock"]
    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 10
