"""`samestep.launch` in scripts: real ranks, their values, their exceptions, and what is left of them.

The functions do not import torch unless they need it, which saves seconds. Notebooks have tests of their own.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from textwrap import dedent
from uuid import uuid4

import psutil
import pytest

import samestep
from samestep.environment.processes import OPEN_RUN, own_variable
from samestep.errors import LaunchError, RankFailed
from samestep.launch import python_launch
from tests.launch.launched import IMPORT_PATH, LAUNCHERS, MARK, variable, wait_for

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Share the result of the bfloat16 probe, which takes seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)


class SampleLost(ValueError):
    def __init__(self, text: str, index: int) -> None:
        super().__init__(text, index)
        self.index = index


class OpensAFile(Exception):
    def __init__(self) -> None:
        super().__init__("broken")
        self.lock = threading.Lock()


@pytest.mark.slow
def test_the_value_of_rank_0_is_returned_and_its_output_shown(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)

    def total(base, scale):
        import os

        from samestep import Run

        with Run(global_batch=4) as run:
            print(f"rank {run.rank} with {os.environ['OMP_NUM_THREADS']} thread(s)")
            return {"sum": run.sum(base + run.rank), "scale": scale, "folder": run.folder, "argv": sys.argv[1:]}

    value = samestep.launch(partial(total, scale=0.5), 10, nproc=2, folder="out")

    assert value == {"sum": 21, "scale": 0.5, "folder": tmp_path / "out", "argv": ["--lr", "0.1"]}
    out, err = capfd.readouterr()
    assert re.fullmatch(r"rank 0 with \d+ thread\(s\)\n", out)
    assert f"samestep: logs in {tmp_path}/out/logs" in err
    known = json.loads((tmp_path / "out" / "config.json").read_text())
    assert known["script"] == python_launch.__name__, "by which `samestep rerun` knows that it cannot repeat the run"
    log = tmp_path / "out" / "logs" / "attempt-0" / "rank-1.out"
    assert log.read_text().startswith("rank 1 with ")


@pytest.mark.slow
def test_the_exception_of_the_rank_that_failed_is_raised_with_the_report(capfd):
    def lose_sample():
        import os
        import time

        if os.environ["RANK"] == "1":
            raise SampleLost("sample 7 is lost", 7)
        time.sleep(300)

    with pytest.raises(SampleLost, match="sample 7 is lost") as raised:
        samestep.launch(lose_sample, nproc=2)

    assert raised.value.index == 7
    (note,) = raised.value.__notes__
    assert note.startswith(
        f"raised on rank 1 in samestep.launch(lose_sample)\nsamestep: 1 of 2 rank(s) on {HOST} failed;"
    )
    assert 'raise SampleLost("sample 7 is lost", 7)' in note.split(f"rank 1 on {HOST}, exit code 1:\n")[1]
    assert "in run_rank" not in note
    assert "Traceback" not in capfd.readouterr().err, "the exception shows the traceback, so the launcher must not"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL: often the kernel's out-of-memory killer"),
        (lambda: (_ for _ in ()).throw(OpensAFile()), "OpensAFile: broken"),
    ],
    ids=["killed", "exception-that-cannot-be-pickled"],
)
def test_a_rank_that_leaves_no_exception_raises_the_report(failure, shown):
    with pytest.raises(RankFailed) as raised:
        samestep.launch(failure, nproc=1)

    first, second, *_ = str(raised.value).splitlines()
    assert first == "samestep.launch(<lambda>) got no value from rank 0"
    logs = rf"{re.escape(str(Path.cwd()))}/runs/lambda-[\d-]+/logs"
    assert re.fullmatch(rf"samestep: 1 of 1 rank\(s\) on {HOST} failed; logs of all ranks: {logs}", second)
    assert shown in str(raised.value)


SLEEPS = """
    import os, pathlib, time
    import samestep

    def wait():
        pathlib.Path(f"up-{os.environ['RANK']}").touch()
        time.sleep(300)

    try:
        samestep.launch(wait, nproc=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "shown"), [(signal.SIGINT, 0, "interrupted\n"), (signal.SIGKILL, -9, "")])
def test_no_process_is_left_if_the_script_is(number, code, shown, tmp_path):
    (tmp_path / "script.py").write_text(dedent(SLEEPS))
    mark = uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        [sys.executable, "-c", "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "runpy.run_path('script.py', run_name='__main__')"],
        env={**inherited, **IMPORT_PATH, MARK: mark}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def running() -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if variable(each, MARK) == mark]

    try:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2, 120)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (code, shown)
        wait_for(lambda: not running(), 60 if number == signal.SIGKILL else 0.1, lambda: str(running()))
    finally:
        for each in running():
            each.kill()


def test_a_function_with_a_lock_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(LaunchError) as raised:
        samestep.launch(lambda: lock.acquire(), nproc=2)
    assert str(raised.value) == (
        "samestep.launch cannot send <lambda> and its arguments to the ranks (TypeError: cannot pickle '_thread.lock' "
        "object): create locks, open files, processes and runs inside of <lambda>, and not as globals that it uses"
    )


def test_a_value_with_a_lock_cannot_be_returned():
    with pytest.raises(LaunchError) as raised:
        python_launch._pickle_value(threading.Lock())
    assert str(raised.value) == (
        "the value that rank 0 returns cannot be sent back (TypeError: cannot pickle '_thread.lock' object): return "
        "numbers, strings or tensors, for example model.state_dict() and not the run"
    )


def test_a_rank_0_that_exits_before_it_returns_gives_no_value(tmp_path):
    with pytest.raises(RankFailed) as raised:
        python_launch._read_value("train", tmp_path)
    assert str(raised.value) == (
        "samestep.launch(train) got no value: rank 0 ended with exit code 0 before train returned; remove sys.exit() "
        "or os._exit() from it"
    )


def test_a_value_that_this_process_cannot_read_is_an_error(tmp_path):
    (tmp_path / "value.pkl").write_bytes(b"cno_such_module\nName\n.")
    with pytest.raises(RankFailed, match=r"cannot read the value of rank 0 in this process \(ModuleNotFoundError: No"):
        python_launch._read_value("train", tmp_path)


def test_an_exception_that_this_process_cannot_read_is_an_error(tmp_path):
    (tmp_path / "error-1.pkl").write_bytes(b"cno_such_module\nName\n.")
    events = python_launch._EventFile(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"launcher-{HOST}.jsonl").write_text(
        '{"event": "failure", "rank": 1, "report": "the report"}\n'
    )
    with pytest.raises(RankFailed) as raised:
        python_launch._raise_failure("train", 1, "", events, tmp_path)
    assert str(raised.value) == (
        "its exception cannot be read in this process (ModuleNotFoundError: No module named 'no_such_module')"
    )
    assert raised.value.__notes__ == ["raised on rank 1 in samestep.launch(train)\nthe report"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc": 0}, 'nproc must be a number of at least 1, "auto", "gpu" or "cpu", got 0'),
        ({"nproc": "two"}, 'nproc must be a number of at least 1, "auto", "gpu" or "cpu", got \'two\''),
        ({"nproc": 2, "max_restarts": -1}, "max_restarts must be a number of at least 0, got -1"),
        ({"time_limit": "soon"}, "time_limit soon is not a time limit: "),
    ],
    ids=str,
)
def test_an_invalid_option_is_refused(options, text):
    with pytest.raises(LaunchError) as raised:
        samestep.launch(print, **options)
    assert str(raised.value).startswith(text)


def test_a_value_is_no_function():
    with pytest.raises(LaunchError) as raised:
        samestep.launch(3)
    assert str(raised.value) == "samestep.launch needs a function, got 3: pass the function itself, not its value"


def test_a_rank_does_not_launch_ranks(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as raised:
        samestep.launch(print)
    assert str(raised.value) == (
        "samestep.launch(print) was called on rank 1 of 2, which a launcher has started already: call print() itself "
        "there, or start the script with plain `python`"
    )


def test_an_open_run_does_not_launch_ranks(monkeypatch):
    monkeypatch.setenv(OPEN_RUN, f"{own_variable()} 0/1/0")
    with pytest.raises(LaunchError) as raised:
        samestep.launch(print)
    assert str(raised.value) == (
        "samestep.launch(print) was called while a Run is open in this process: call it before `with Run`, or after "
        "the run has ended"
    )


def test_without_cloudpickle_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        LaunchError, match=r"needs cloudpickle and cannot import it \(.*\): run `pip install cloudpickle`"
    ):
        samestep.launch(print)


def test_a_mistake_that_the_launcher_finds_is_raised_with_its_message(tmp_path):
    events = python_launch._EventFile(tmp_path)
    with pytest.raises(LaunchError) as raised:
        python_launch._raise_failure("train", 2, "samestep: --on-hang restart needs restarts", events, tmp_path)
    assert str(raised.value) == "samestep.launch(train) cannot start: --on-hang restart needs restarts"


def test_a_launcher_that_is_killed_is_an_error(tmp_path):
    events = python_launch._EventFile(tmp_path)
    with pytest.raises(RankFailed) as raised:
        python_launch._raise_failure("train", -9, "", events, tmp_path)
    assert str(raised.value) == (
        "samestep.launch(train): the launcher ended with exit code -9; it has printed why, or was killed"
    )


def test_the_package_is_the_function_and_does_not_import_torch():
    code = (
        "import sys, inspect, samestep\n"
        "from samestep import launch\n"
        "import samestep.launch.python_launch\n"
        "assert launch is samestep.launch and callable(launch), launch\n"
        "assert list(inspect.signature(launch).parameters)[:3] == ['function', 'arguments', 'nproc']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **IMPORT_PATH})
