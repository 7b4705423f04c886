"""Commands in bad surroundings: streams that are closed, full or cannot print, missing homes, broken files."""

import builtins
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest

from samestep import __version__
from samestep.__main__ import main as start
from samestep.cli.main import OutputStream
from samestep.launch.slurm import SubmittedJob, add_to_job_list
from tests.faults.harness import Fault, cases, check

FULL = "samestep: the output is incomplete, since standard output failed: the disk is full: free some space"
UNPRINTABLE = SubmittedJob("7", "caf\u00e9 \u2192", "2026-01-31T09:30:05", 1, "/\udcff", "f", ("train.py",))
STREAMS = [
    Fault("stdout is closed", r"^$", code=0, command="samestep --version >&-"),
    Fault(
        "stdout is closed and the width of a terminal is needed",
        r"^`samestep recipe run NAME` runs one, `\S+ \S+ "
        r"copy NAME` copies its script$",
        code=0,
        command="samestep recipe list >&-",
    ),
    Fault("all streams are closed", r"^$", code=2, command="samestep audit nowhere <&- >&- 2>&-"),
    Fault("stdout is full", f"^{FULL}$", code=1, command="samestep --version > /dev/full"),
    Fault("stdout is full and the table of rich is cut", FULL, code=1, command="samestep recipe list > /dev/full"),
    Fault("stderr is full", f"^samestep {re.escape(__version__)}$", code=0, command="samestep --version 2> /dev/full"),
    Fault("stderr is full and an error is lost", r"^$", code=2, command="samestep nonsense 2> /dev/full"),
    Fault("both are full", r"^$", code=1, command="samestep --version > /dev/full 2>&1"),
    Fault("the reader of a pipe is gone", r"^141$", code=0, command="samestep --help | true; echo ${PIPESTATUS[0]}"),
    Fault(
        "an error, and the reader of a pipe is gone",
        r"unknown command nonsense.* 2$",
        code=0,
        command="samestep nonsense | true; echo ${PIPESTATUS[0]}",
    ),
    *(
        Fault(
            f"table with characters that the terminal cannot print: {variables}",
            r"caf(\\xe9|\ufffd) \\u2192 .* /\\udcff",
            code=0,
            command=f"{variables} PATH=$(dirname $(command -v samestep)) XDG_STATE_HOME=$PWD samestep jobs",
            prepare=lambda folder: add_to_job_list(folder / "samestep" / "jobs.jsonl", UNPRINTABLE),
        )
        for variables in ("PYTHONIOENCODING=ascii", "PYTHONIOENCODING=latin-1", "LC_ALL=C PYTHONUTF8=0")
    ),
    Fault(
        "path with bytes that are not text",
        r"^samestep: the folder x\\udcff does not exist",
        code=2,
        command="samestep checkpoint verify $'x\\xff'",
    ),
    Fault(
        "help without docstrings",
        "Start SCRIPT as ranks that train together; the exit code is that of",
        code=0,
        command="python -OO -m samestep run --help",
    ),
]


@pytest.mark.slow
@cases(STREAMS)
def test_a_stream_that_fails_ends_no_command_with_a_traceback(fault: Fault, tmp_path: Path):
    check(fault, tmp_path)


HELP_OF_ALL = """
import sys
from samestep.cli import main as module
def show(command, context):
    print(command.get_help(context))
    for name in getattr(command, "list_commands", lambda _: [])(context):
        each = command.get_command(context, name)
        show(each, module.click.Context(each, context, name))
module.main(["--version"])
show(module.samestep, module.click.Context(module.samestep, info_name="samestep"))
"""


def test_help_texts_do_not_need_docstrings():
    with_docstrings, without = (
        subprocess.run([sys.executable, *flags, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True).stdout
        for flags in ([], ["-OO"])
    )
    assert "Read every byte and compare checksums" in with_docstrings
    assert without == with_docstrings


def test_a_non_blocking_pipe_delays_the_output_but_loses_nothing():
    """Another program on the same terminal may have made it non-blocking."""
    (reader, writer), text, received = os.pipe(), b"x" * 500_000, []
    os.set_blocking(writer, False)

    def read() -> None:
        with os.fdopen(reader, "rb") as file:
            received.append(file.read())

    thread = Thread(target=read)
    thread.start()
    with OutputStream(writer) as stream:
        stream.write(text)
    os.close(writer)
    thread.join(120)
    assert stream.failure is None
    assert received == [text]


TRAINING = """
    import os, sys, torch
    from samestep import Run
    {before}
    model = torch.nn.Linear(1, 1)
    with Run(global_batch=2, folder="run") as run:
        model = run.wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.print("caf\\u00e9 \\u2192")
        for epoch in run.shard(torch.utils.data.TensorDataset(torch.ones(8, 1))).epochs(2):
            for step in epoch:
                for (batch,) in step:
                    step.mean(model(batch).square()[:, 0]).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({{"val/x": 1.0}})
    run.print("caf\\u00e9 of a closed run")
    print("trained", step.number, open("run/log.txt").read().count("caf"), file=sys.stderr)
"""
LOST = "SamestepWarning: standard output cannot be written: %s; training continues, and log.txt has all lines"
CONSOLES = [
    Fault(
        "training with a full stdout",
        f"{LOST % 'the disk is full: free some space'}.* trained 7 1$",
        code=0,
        script=TRAINING.format(before="os.dup2(os.open('/dev/full', os.O_WRONLY), 1)")
        + "    import atexit; atexit._run_exitfuncs()  # a forked process does it later than Python",
    ),
    Fault(
        "training whose reader is gone",
        f"{LOST % 'Broken pipe'}.* trained 7 1$",
        code=0,
        script=TRAINING.format(before="r, w = os.pipe(); os.close(r); os.dup2(w, 1)"),
    ),
    Fault(
        "training without stdout",
        "^trained 7 1$",
        code=0,
        script=TRAINING.format(before="os.close(1); sys.stdout = None"),
    ),
    Fault(
        "training on a terminal that cannot print a character",
        r" caf\\xe9 \\u2192 .*trained 7 1$",
        code=0,
        script=TRAINING.format(before="sys.stdout.reconfigure(encoding='ascii', errors='strict')"),
    ),
    Fault(
        "training with a closed sys.stdout",
        f"{LOST % 'I/O operation on closed file.'}.* trained 7 1$",
        code=0,
        script=TRAINING.format(before="os.dup(1); sys.stdout.close()"),
    ),
]


@cases(CONSOLES)
def test_a_stream_that_fails_does_not_end_training(fault: Fault, tmp_path: Path):
    check(fault, tmp_path)


# Homes

NO_HOME = """
    import os, pwd, sys
    def unknown(_):
        raise KeyError
    pwd.getpwuid = unknown
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ.update({variables})
    from samestep.cli.main import main
    sys.exit(main({arguments}))
"""
HOMES = [
    Fault(
        "launch without a home directory",
        "trained",
        code=0,
        script=NO_HOME.format(variables={}, arguments=["run", "--nproc-per-node", "1", "--folder", "kept", "rank.py"]),
        prepare=lambda folder: (folder / "rank.py").write_text("print('trained')"),
    ),
    Fault(
        "no home directory",
        "your user id [0-9]+ has no home directory for the list of submitted jobs: set XDG_STATE_HOME or HOME",
        code=2,
        script=NO_HOME.format(variables={}, arguments=["jobs"]),
    ),
    Fault(
        "home directory that does not exist",
        "no jobs submitted yet.*jobs are listed in /nowhere/.local/state/samestep/jobs.jsonl",
        code=0,
        script=NO_HOME.format(variables={"HOME": "/nowhere"}, arguments=["jobs"]),
    ),
    Fault(
        "cache folder that is a file",
        "The calibration cannot be saved to /dev/null/samestep .*Set XDG_CACHE_HOME to a folder that you can write to",
        code=2,
        script=NO_HOME.format(variables={"XDG_CACHE_HOME": "/dev/null"}, arguments=["plan", "--calibrate"]),
    ),
    Fault(
        "relative state folder and no home directory",
        "has no home directory for the list of submitted jobs",
        code=2,
        script=NO_HOME.format(variables={"XDG_STATE_HOME": "here", "HOME": ""}, arguments=["jobs"]),
    ),
    Fault(
        "list of jobs is a folder",
        "the list of submitted jobs .*jobs.jsonl is not a file: remove it",
        code=2,
        script=NO_HOME.format(variables={"XDG_STATE_HOME": "."}, arguments=["jobs"]).replace("'.'", "os.getcwd()"),
        prepare=lambda folder: (folder / "samestep" / "jobs.jsonl").mkdir(parents=True),
    ),
]


@pytest.mark.slow
@cases(HOMES)
def test_a_home_that_cannot_be_used_is_named(fault: Fault, tmp_path: Path):
    check(fault, tmp_path)


@pytest.mark.slow
def test_a_launcher_whose_reader_is_gone_ends_with_the_exit_code_of_the_training(tmp_path: Path):
    (tmp_path / "train.py").write_text("for i in range(100_000): print(i)\nraise SystemExit(5)")
    command = "samestep run --nproc-per-node 1 train.py 2> err | head -1; echo ${PIPESTATUS[0]}; grep -c Traceback err"
    check(Fault("", r"^0 5 0$", code=1, command=command), tmp_path)


# Ctrl-C


def interrupt(arguments: list[str], folder: Path, started: str, **variables: str) -> tuple[int, str]:
    """Start a command, send Ctrl-C to its process group when it has created the file, return exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", *arguments],
        cwd=folder, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        # Children of a test runner in the background of a shell would ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (folder / started).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):  # it has ended before, as its exit code and error show
            os.killpg(process.pid, signal.SIGINT)
        error = process.communicate(timeout=120)[1]
        return process.returncode, error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def waiting_program(folder: Path, name: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\ntouch {folder}/started\nexec sleep 200\n")
    (folder / name).chmod(0o755)


def test_ctrl_c_while_slurm_does_not_answer(tmp_path: Path):
    waiting_program(tmp_path, "scontrol")
    job = SubmittedJob("7", "train", "2026-01-31T09:30:05+01:00", 2, str(tmp_path), "f", ("train.py",))
    add_to_job_list(tmp_path / "samestep" / "jobs.jsonl", job)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    code, error = interrupt(["jobs"], tmp_path, "started", PATH=path, XDG_STATE_HOME=str(tmp_path))
    assert (code, error.strip()) == (130, "")


def test_ctrl_c_while_sbatch_does_not_answer(tmp_path: Path):
    waiting_program(tmp_path, "sbatch")
    (tmp_path / "train.py").touch()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert interrupt(["submit", "train.py"], tmp_path, "started", PATH=path) == (130, "\n")


@pytest.mark.slow
def test_ctrl_c_while_a_plan_imports_the_script(tmp_path: Path):
    (tmp_path / "model.py").write_text("import time\nopen('started', 'w')\nfor _ in range(2000): time.sleep(0.1)\n")
    code, error = interrupt(["plan", "model.py:build", "--global-batch", "8"], tmp_path, "started")
    assert (code, error.strip()) == (130, "")


@pytest.mark.slow
def test_ctrl_c_in_a_comparison_leaves_no_rank(tmp_path: Path):
    script = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nos.rename('pid', 'started')\ntime.sleep(200)"
    (tmp_path / "train.py").write_text(script)
    code, error = interrupt(["parity", "train.py"], tmp_path, "started")
    assert code == 130, error
    assert not psutil.pid_exists(int((tmp_path / "started").read_text()))


def test_ctrl_c_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch):
    def interrupted(name: str, *arguments: object, imported: Callable[..., object] = builtins.__import__) -> object:
        if name == "samestep.cli.main":
            raise KeyboardInterrupt
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert start() == 130


def test_following_a_job_ends_with_the_reader_of_the_output(tmp_path: Path):
    programs = {
        "sbatch": "echo 12",
        "scontrol": r"printf '\n   JobState=RUNNING Reason=None \n   Requeue=1 Restarts=0 x ExitCode=0:0\n'",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm-12.log").write_bytes(b"caf\xc3\xa9\n" * 100_000)
    fault = Fault("", r"^café 141 .*samestep: job 12 continues; cancel it with `scancel 12`", code=0, command=(
        f"PATH={tmp_path}:$PATH; samestep submit --follow --folder run train.py 2> err | head -2 | tail -1; "
        "echo ${PIPESTATUS[0]}; cat err"
    ), environment={"XDG_STATE_HOME": str(tmp_path)})  # fmt: skip
    check(fault, tmp_path)
