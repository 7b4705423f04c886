"""The probe inside of a process: it starts with any Python program and changes nothing else."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from samestep.distributed.process_group import watch_hangs
from samestep.hang import rank_probe
from samestep.hang.hang_cause import find_cause
from samestep.hang.node_evidence import NodeProbe
from tests.hang.probed import place
from tests.launch.launched import wait_for

MODULES = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"


@pytest.fixture
def variables():
    probe = NodeProbe()
    yield lambda environ: {**environ, **probe.variables(environ)}
    probe.close()


def run(environ, *arguments, python=sys.executable, **options):
    return subprocess.run([python, *arguments], env=environ, capture_output=True, text=True, check=False, **options)


def test_a_process_has_few_more_modules_and_the_same_path(variables):
    environ = dict(os.environ)
    modules, path = json.loads(run(environ, "-c", MODULES).stdout)
    probed_modules, probed_path = json.loads(run(variables(environ), "-c", MODULES).stdout)
    assert probed_path == path
    added = {"__future__", "samestep.hang.rank_probe", "sitecustomize", "atexit", "faulthandler", "_socket"}
    assert {*probed_modules} - {*modules} <= added
    assert "samestep.hang.rank_probe" in probed_modules


@pytest.mark.parametrize("options", [["-I"], ["-S"], ["-E"]])
def test_python_without_the_variables_or_without_site_runs_without_the_probe(variables, options):
    ended = run(
        variables(dict(os.environ)), *options, "-c", "import sys; print('samestep.hang.rank_probe' in sys.modules)"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")


def test_a_launcher_that_is_gone_leaves_variables_that_do_nothing(variables, tmp_path):
    environ = variables(dict(os.environ)) | {"SAMESTEP_HANG_FOLDER": str(tmp_path / "gone")}
    ended = run(environ, "-c", "import sys; print('samestep.hang.rank_probe' in sys.modules)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")


def test_the_sitecustomize_of_the_user_runs_too(variables, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("answer = 42")
    environ = variables({**os.environ, "PYTHONPATH": str(tmp_path)})
    code = "import sitecustomize, sys; print(sitecustomize.answer, 'samestep.hang.rank_probe' in sys.modules)"
    ended = run(environ, "-c", code)
    assert (ended.stdout, ended.stderr) == ("42 True\n", "")


@pytest.mark.parametrize("code", ["raise ValueError('mine')", "import missing_module"])
def test_an_error_in_the_sitecustomize_of_the_user_is_reported_as_without_samestep(variables, tmp_path, code):
    (tmp_path / "sitecustomize.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    without = run(environ, "-c", "print('runs')")
    ended = run(variables(environ), "-c", "import sys; print('samestep.hang.rank_probe' in sys.modules and 'runs')")
    assert (ended.returncode, ended.stdout) == (without.returncode, without.stdout)
    assert ended.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]


def test_a_virtual_environment_without_samestep_has_the_probe(variables, tmp_path):
    run(dict(os.environ), "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    code = "import sys; print('samestep.hang.rank_probe' in sys.modules, sys.prefix)"
    ended = run(variables(dict(os.environ)), "-c", code, python=str(tmp_path / "venv/bin/python"))
    assert (ended.stdout, ended.stderr) == (f"True {tmp_path / 'venv'}\n", "")


def test_a_script_sees_no_other_threads_or_handlers(processes):
    process = processes.start(
        f"""
        import signal, threading
        assert threading.active_count() == 1
        assert signal.getsignal({rank_probe.SIGNAL}) is signal.SIG_DFL
        ready()
        """
    )
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0


def test_a_forked_child_has_one_thread_and_its_end_does_not_touch_the_parent(processes):
    process = processes.start(
        """
        import os, sys
        if os.fork() == 0:
            assert len(os.listdir("/proc/self/task")) == 1
            sys.exit(0)  # runs the exit functions
        assert os.wait()[1] == 0
        ready()
        time.sleep(100)
        """
    )
    assert processes.probe.progress(process.pid, 120) is not None


def test_a_process_without_files_left_can_fork(processes):
    """EMFILE in the child is not an error of the script."""
    process = processes.start(
        """
        import os, resource
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        if os.fork() == 0:
            os._exit(0)
        assert os.wait()[1] == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        ready()
        """
    )
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0


@pytest.mark.slow
def test_short_processes_end_well(variables):
    """A thread that still starts while Python ends crashed one of 900 processes, before they waited for it."""
    environ = variables(dict(os.environ))
    for _ in range(25):
        several = [subprocess.Popen([sys.executable, "-c", ""], env=environ) for _ in range(8)]
        assert [each.wait(120) for each in several] == [0] * 8


@pytest.mark.slow
def test_a_process_that_ends_during_a_request_ends_well(processes):
    stop = threading.Event()
    pids = list[int]()

    def ask():
        while not stop.is_set():
            processes.probe.progress_of(list(pids), 0.2)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for number in range(12):
            process = processes.start(f"ready()\ntime.sleep({number / 400})", wait=False)
            pids.append(process.pid)
            assert process.communicate(timeout=120) == ("", None)
            assert process.returncode == 0
    finally:
        stop.set()
        asking.join()


def test_a_nested_launcher_has_its_own_folder(processes, tmp_path):
    """The variables that it inherits do not lead its ranks to the outer launcher."""
    inner = tmp_path / "inner"
    process = processes.start(
        f"""
        import os, pathlib, subprocess, sys
        from samestep.hang.node_evidence import NodeProbe
        probe = NodeProbe(pathlib.Path({str(inner)!r}))
        environ = os.environ | probe.variables(os.environ)
        assert environ["PYTHONPATH"].count("hang/startup") == 1
        with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as rank:
            while probe.progress(rank.pid) is None:
                time.sleep(0.01)
            ready()
            time.sleep(100)
        """
    )
    evidence = processes.collect(process)
    assert [path.suffix for path in inner.iterdir()] == [".sock"]
    assert [child.command.split()[-1] for child in evidence.children] == ["input()"]
    assert len(list(processes.probe.folder.iterdir())) == 1


def test_multiprocessings_own_processes_do_not_answer(processes):
    """The forkserver should not have a thread when it forks."""
    process = processes.start(
        """
        import multiprocessing, time
        def work():
            ready()
            time.sleep(100)
        if __name__ == "__main__":
            child = multiprocessing.get_context("forkserver").Process(target=work)
            child.start()
            child.join()
        """
    )
    assert [path.name for path in processes.probe.folder.iterdir()] == [f"{process.pid}.sock"]


def test_a_stopped_launcher_does_not_block_a_rank(processes):
    """The probe gives up on a request that is never read, and answers others."""
    process = processes.start("ready()\ntime.sleep(100)")
    path = processes.probe.folder / f"{process.pid}.sock"
    wait_for(path.exists, 120)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))  # and sends nothing
        assert processes.probe.progress(process.pid, 120) is not None


@pytest.mark.slow
def test_a_data_worker_with_busy_threads_survives_the_signal_many_times(processes):
    """Faulthandler crashed one in 1,000 when it read the frames of the other threads, which change meanwhile."""
    process = processes.start(
        """
        import os, threading
        def work():
            while True:
                exec("f = lambda depth: f(depth - 1) if depth else 0; f(150)", {})
        child = os.fork()
        if child == 0:
            for _ in range(4):
                threading.Thread(target=work).start()
            ready()
            work()
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -15
        """
    )
    (child,) = [each.pid for each in processes.collect(process).children]
    for _ in range(3000):
        os.kill(child, rank_probe.SIGNAL)
        time.sleep(0.001)
    os.kill(child, signal.SIGTERM)
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0


def test_the_kernel_has_no_other_thread_at_a_fork(processes):
    """From Python 3.12 on, os.fork warns if it does."""
    process = processes.start(
        """
        import os
        from samestep.hang import rank_probe
        probe = rank_probe._probe
        for _ in range(300):
            probe._before_fork()
            assert len(os.listdir("/proc/self/task")) == 1
            probe._after_fork()
        ready()
        """
    )
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0


def test_a_fork_leaves_no_open_socket_behind(processes):
    process = processes.start(
        """
        import os
        for _ in range(50):
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        ready()
        """,
        "-Walways",
    )
    assert process.communicate(timeout=120) == ("", None)


def test_a_run_that_has_ended_is_not_kept_for_the_end_of_the_process(monkeypatch):
    monkeypatch.setattr(rank_probe, "is_running", lambda: True)
    monkeypatch.setattr(rank_probe, "_at_end", [])
    store = HashStore()
    first, second = Mock(), Mock()
    stop = watch_hangs("gloo", store, 0, 1, first)
    watch_hangs("gloo", store, 0, 1, second)
    assert rank_probe._at_end == [first, second]
    stop()
    stop()
    assert rank_probe._at_end == [second]


C10D = "torch.distributed.distributed_c10d"


@pytest.mark.parametrize(
    ("world", "error"),
    [
        ("types.SimpleNamespace(_groups={})", f"AttributeError: module '{C10D}' has no attribute '_world'"),
        ("types.SimpleNamespace(_world=types.SimpleNamespace())", "AttributeError: 'types.SimpleNamespace' object has"),
        ("types.SimpleNamespace(_world=Broken())", "ZeroDivisionError: division by zero"),
    ],
)
def test_stacks_are_known_and_the_error_is_reported_if_torch_has_other_names(processes, world, error):
    process = processes.start(
        f"""
        import sys, types
        class Broken:
            pg_names = pg_group_ranks = property(lambda self: 1 / 0)
        sys.modules["torch"] = types.SimpleNamespace(_C=types.SimpleNamespace(_distributed_c10d=1))
        module = sys.modules["{C10D}"] = types.ModuleType("{C10D}")
        vars(module).update(vars({world}))
        ready()
        time.sleep(100)
        """
    )
    evidence = processes.collect(process)
    assert evidence.collectives is None
    assert evidence.error.startswith(error)
    assert place(evidence.process.stacks["main"]) == "script0.py:9 <module>"
    assert processes.probe.progress(process.pid, 120) is None
    assert processes.probe.errors == {process.pid: evidence.error}


def test_a_script_that_imports_torch_at_this_moment_is_not_an_error(processes):
    process = processes.start(
        f"""
        import sys, types
        module = sys.modules["{C10D}"] = types.ModuleType("{C10D}")
        module.__spec__ = types.SimpleNamespace(_initializing=True)  # as importlib sets it
        ready()
        time.sleep(100)
        """
    )
    assert processes.probe.progress(process.pid, 120).calls == 0
    assert processes.probe.errors == {}
    assert processes.collect(process).error == ""


def test_a_script_that_resets_all_handlers_is_not_ended_by_the_signal(processes):
    """Lightning does that. Its data workers, which are forked later, have a handler again."""
    process = processes.start(
        f"""
        import os, signal, re
        signal.signal({rank_probe.SIGNAL}, signal.SIG_DFL)
        if os.fork() == 0:
            ready()
            time.sleep(100)
        re.match("(a+)+$", "a" * 60 + "b")
        """
    )
    evidence = processes.collect(process)
    assert process.poll() is None
    assert evidence.process.stacks == {}
    assert [place(child.stacks["main"]) for child in evidence.children] == ["script0.py:6 <module>"]


def test_reading_stacks_does_not_import_inductor_but_other_threads_can(monkeypatch):
    torch, inductor = ModuleType("torch"), ModuleType("torch._inductor")
    inductor.options = "imported"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
    seen = list[ModuleType]()
    recorder = rank_probe._Recorder(lambda *options: seen.append(torch._inductor) or b"N.")
    recorder.read(True, True)
    assert not hasattr(torch, rank_probe.INDUCTOR)
    (stand_in,) = seen
    assert not hasattr(stand_in, "codecache")
    found = list[str]()
    thread = threading.Thread(target=lambda: found.append(stand_in.options))
    thread.start()
    thread.join()
    assert found == ["imported"]
    torch._inductor = inductor  # the script compiles
    recorder.read(True, True)
    assert seen[1] is inductor
    assert torch._inductor is inductor


def test_a_request_that_nobody_waits_for_does_not_end_a_script_with_the_default_sigpipe(processes):
    process = processes.start(
        """
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        ready()
        time.sleep(100)
        """
    )
    path = processes.probe.folder / f"{process.pid}.sock"
    wait_for(path.exists, 120)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(str(path))
            impatient.sendall(b"evidence")
    wait_for(lambda: processes.probe.progress(process.pid, 1) is not None or process.poll() is not None, 120)
    assert process.poll() is None


def test_a_forked_child_is_not_watched_by_the_launcher(processes):
    process = processes.start(
        """
        import os
        from samestep.hang import rank_probe
        assert rank_probe.is_running()
        if os.fork() == 0:
            os._exit(rank_probe.is_running())
        assert os.wait()[1] == 0
        ready()
        """
    )
    assert process.communicate(timeout=120) == ("", None)
    assert process.returncode == 0


def test_a_coroutine_that_waits_is_on_the_main_stack(processes):
    process = processes.start(
        """
        import asyncio

        async def fetch():
            ready()
            await asyncio.sleep(600)

        async def main():
            await fetch()

        asyncio.run(main())
        """
    )
    stack = processes.collect(process).process.stacks["main"]
    assert place(stack) == "script0.py:6 fetch", stack
    own = [frame.function for frame in stack if frame.file.endswith("script0.py")]
    assert own == ["fetch", "main", "<module>"]


def test_a_rank_that_only_starts_others_is_as_far_as_these(processes):
    """As with mp.spawn: the children have the group."""
    process = processes.start(
        """
        import multiprocessing
        import os
        from datetime import timedelta

        def work(rank, folder):
            import torch
            import torch.distributed as dist

            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                ready()
                time.sleep(600)
            dist.all_reduce(torch.ones(1))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            children = [context.Process(target=work, args=(rank, os.getcwd())) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
        """
    )
    found = []
    wait_for(lambda: found.append(processes.probe.progress(process.pid, 10)) or found[-1].waiting > 1, 120)
    assert (found[-1].calls, found[-1].timeout) == (3, 300)
    evidence = processes.collect(process)
    cause = find_cause([evidence], world_size=1)
    assert cause.kind == "other_process"
    assert any(each.frame and place([each.frame]) == "script0.py:15 work" for each in cause.sentences), cause
