"""What `samestep submit` writes for sbatch, compared word for word, and what it refuses to write."""

import doctest
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.environment.slurm_variables import port_of
from samestep.errors import LaunchError
from samestep.launch import job as time_limit
from samestep.launch import sbatch, slurm
from samestep.launch import slurm as submitted
from samestep.launch.job import read_time_limit
from samestep.launch.sbatch import SlurmJob, log_of, notes_of, read_asked, read_variable, sbatch_text
from samestep.launch.slurm import (
    JobState,
    LogTail,
    Submitted,
    how_are,
    how_is,
    read_record,
    read_sacct,
    read_scontrol,
    record_path,
    remember,
)

GOLDEN = Path(__file__).parent.parent / "slurm" / "golden"
PLAIN = SlurmJob(
    target="train.py",
    module=False,
    arguments=("--lr", "0.1"),
    name="train",
    nodes=1,
    processes="auto",
    folder=Path("/home/ada/runs/train"),
    directory=Path("/home/ada"),
    python="/home/ada/.venv/bin/python",
)
FULL = replace(
    PLAIN,
    target="lab.train",
    module=True,
    name="lab.train",
    nodes=2,
    processes="4",
    seconds=4 * 3600,
    warning=300,
    asked=(("partition", "gpu,big"), ("gpus-per-node", "a100:4"), ("constraint", "a100&nvlink"), ("exclusive", None)),
    variables=(("NCCL_DEBUG", "INFO"),),
    setup=("module load cuda", "source env.sh"),
)
ODD = replace(
    PLAIN,
    target="a'; echo foo",
    arguments=("two\nlines", "#SBATCH --nodes=9", "$HOME", "`id`", "", "*"),
    name='it\'s "50%" #1 \\',
    folder=Path("/home/ada/100% 'odd' #1"),
    directory=Path("/home/ada/a\nb"),
    requeue=False,
    warning=0,
    variables=(("TEXT", "x'; echo foo\n#y"),),
)
JOBS = {"plain": PLAIN, "full": FULL, "odd": ODD}
OPTIONS = (
    "--account, --constraint, --cpus-per-task, --dry-run, --env, --exclusive, --folder, --follow, --gpus-per-node, "
    "--help, --job-name, --mem, --module, --nodes, --nproc-per-node, --partition, --qos, --requeue, --sbatch, --setup, "
    "--signal-before, --time"
)
FORMS = (
    "type hours, minutes and seconds as in 4:00:00 or 3h55m, days before them as in 1-12:00:00 or 1d12h, or a number of"
)

# What is typed after `samestep submit`, in a folder with train.py.
MISTAKES = [
    ([], "no script was named: type `samestep submit train.py`, or `samestep submit -m package.module`"),
    (["train.py", "--fast"], f"there is no option --fast: there are {OPTIONS}; options of the script follow `--`\n"),
    (["nope.py"], "there is no script nope.py in HERE: here are train.py\n"),
    (["-m", "nope"], "there is no module nope: nope is neither in HERE nor installed; type its dotted name"),
    (["--nodes", "0", "train.py"], "Invalid value for '--nodes': 0 is not in the range x>=1.\n"),
    (
        ["--nproc-per-node", "two", "train.py"],
        "--nproc-per-node two is impossible: type auto, gpu, cpu or a number from 1 up\n",
    ),
    (["--time", "soon", "train.py"], f"--time soon is not a time limit: {FORMS} minutes\n"),
    (["--time", "0", "train.py"], f"--time 0 is not a time limit: {FORMS} minutes\n"),
    (["--time", "1:99:00", "train.py"], f"--time 1:99:00 is not a time limit: {FORMS} minutes\n"),
    (
        ["--time", "2m", "train.py"],
        "--signal-before 120 leaves nothing of --time 2:00, which is 120 s: type a smaller number, or 0 for no "
        "warning\n",
    ),
    (["--env", "A", "train.py"], "--env A is not a variable: type NAME=VALUE, as in --env NCCL_DEBUG=INFO\n"),
    (["--env", "a-b=1", "train.py"], "--env a-b=1 is not a variable: type NAME=VALUE, as in --env NCCL_DEBUG=INFO\n"),
    (
        ["--sbatch", "-p gpu", "train.py"],
        "--sbatch -p gpu is not an option of sbatch: type NAME=VALUE with its long name, as in "
        "--sbatch reservation=night\n",
    ),
    (
        ["--sbatch", "ntasks=4", "train.py"],
        "--sbatch ntasks=4 is for samestep to decide: each node runs one launcher: type --nproc-per-node for the ranks "
        "it starts\n",
    ),
    (
        ["--job-name", "a\nb", "train.py"],
        "--job-name 'a\\nb' has a line break, which no option of sbatch can hold: leave it out\n",
    ),
    (
        ["--folder", "a\\b", "train.py"],
        "SLURM cannot write a log into 'HERE/a\\\\b', whose name holds a backslash or a line break: name another "
        "--folder\n",
    ),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("module", [sbatch, slurm, submitted, time_limit])
def test_the_examples_in_the_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("name", JOBS)
def test_the_file_is_the_golden_one(name):
    golden = GOLDEN / f"{name}.sbatch"
    text = sbatch_text(JOBS[name])
    if "SAMESTEP_WRITE_GOLDEN" in os.environ:  # after a change that was meant; git then shows what it changed
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_a_shell_finds_every_value_as_it_was_given(name, tmp_path):
    job = JOBS[name]
    # Up to the part that is the same for every job: nothing of it speaks to SLURM.
    values = sbatch_text(job).partition("\nnote() {")[0].replace("cd -- ", "true -- ")
    setup = "\n".join(job.setup)
    show = 'printf "%s\\0" "$_python" "$_folder" "${_options[@]}" "${_script[@]}" "$_requeue" "${TEXT-}"'
    told = subprocess.run(
        ["bash", "-c", f"{values.replace(setup, '') if setup else values}\n{show}"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    options = ["--nproc-per-node", job.processes, "--folder", str(job.folder), *(["--module"] * job.module)]
    requeue, value = "yes" if job.requeue else "no", dict(job.variables).get("TEXT", "")
    assert told.stdout.split("\0")[:-1] == [
        job.python, str(job.folder), *options, job.target, *job.arguments, requeue, value,
    ]  # fmt: skip
    assert told.stderr == ""


@pytest.mark.parametrize("job", [1, 42, 195, 196, 123_456_789])
def test_the_shell_derives_the_port_that_ranks_of_srun_would(job):
    (line,) = [line for line in sbatch_text(PLAIN).splitlines() if line.startswith("_port=")]
    command = ["bash", "-c", f'{line}\necho "$_port"']
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={"SLURM_JOB_ID": str(job)})
    assert int(told.stdout) == port_of(job, 0)


def test_a_dry_run_prints_the_file_and_leaves_nothing(here, capsys):
    assert (
        main(["submit", "train.py", "--dry-run", "--time", "3h55m", "--qos", "low", "--folder", "f", "--", "--lr", "1"])
        == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert "#SBATCH --job-name=train\n#SBATCH --nodes=1\n" in out
    assert f"#SBATCH --time=3:55:00\n#SBATCH --qos=low\n#SBATCH --output={here}/f/slurm-%j.log\n" in out
    assert "\n_script=(train.py --lr 1)\n" in out
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("typed", "complaint"), MISTAKES, ids=[" ".join(typed) for typed, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(typed, complaint, here, capsys):
    assert main(["submit", "--dry-run", *typed]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("samestep: " + complaint.replace("HERE", str(here)))
    assert err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_without_sbatch_one_line_says_where_to_submit(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert main(["submit", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "samestep: sbatch is not on this machine: submit from a login node of the cluster, type --dry-run to see the "
        "file, or `samestep run` to train here\n"
    )
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:30", 1830),
        ("4:00:00", 14400),
        ("48:00:00", 172800),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
        ("3h55m", 14100),
        ("90min", 5400),
        ("1d12h", 129600),
        ("45S", 45),
    ],
)
def test_time_limits_are_read_as_slurm_and_people_write_them(text, seconds):
    assert read_time_limit("--time", text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "1:2:3:4", "4h30", "1.5h", "h", "UNLIMITED", "1-", "\u0663"])
def test_what_is_no_time_limit_is_refused_by_name(text):
    with pytest.raises(LaunchError, match=r"^--time-limit .*is not a time limit: type hours"):
        read_time_limit("--time-limit", text)


def test_further_options_and_variables_keep_their_values():
    assert read_asked("comment=a=b # c") == ("comment", "a=b # c")
    assert read_asked("--contiguous") == ("contiguous", None)
    assert read_variable("A=") == ("A", "")


def test_a_job_name_cannot_pass_for_a_state():
    text = (
        "JobId=5 JobName=x JobState=COMPLETED Reason=None\n"
        "   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)\n"
        "   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:9\n   WorkDir=/x ExitCode=0:0\n"
    )
    assert read_scontrol(text) == JobState("FAILED", "NonZeroExitCode", 137, 2)
    assert read_scontrol("No jobs in the system\n") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED|0:0|1\n", JobState("COMPLETED", "", 0, 1)),
        ("FAILED|3:0|0\n", JobState("FAILED", "", 3, 0)),
        ("TIMEOUT|0:0|Unknown\n", JobState("TIMEOUT", "", 0, 0)),
        ("", None),
    ],
)
def test_accounting_is_understood(text, state):
    assert read_sacct(text) == state


def test_only_a_completed_job_has_exit_code_0():
    assert [JobState(state).exit_code for state in ("COMPLETED", "CANCELLED", "TIMEOUT", "UNKNOWN")] == [0, 1, 1, 1]
    assert [JobState(state).ended for state in ("PENDING", "RUNNING", "UNREACHABLE", "TIMEOUT")] == [False] * 3 + [True]


@pytest.fixture
def entry(tmp_path: Path) -> Submitted:
    return Submitted("7", "train", "2026-01-31T09:30:05+01:00", 2, str(tmp_path), "f", ("train.py", "--lr"))


def test_the_record_comes_back_as_it_was_without_a_line_that_a_crash_cut(entry, tmp_path):
    path = tmp_path / "state" / "jobs.jsonl"
    remember(path, entry)
    with path.open("a") as file:
        file.write('{"job": "8", "na\n')
    remember(path, replace(entry, job="9"))
    assert read_record(path) == [entry, replace(entry, job="9")]


def test_a_record_that_cannot_be_written_says_so_and_names_the_job(entry, tmp_path):
    (tmp_path / "state").touch()
    with pytest.raises(LaunchError, match=r"^job 7 is submitted, but .* cannot be written .*: set XDG_STATE_HOME"):
        remember(tmp_path / "state" / "jobs.jsonl", entry)


def test_the_record_lies_where_the_user_keeps_state(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert record_path({}) == Path("/home/ada/.local/state/samestep/jobs.jsonl")
    assert record_path({"XDG_STATE_HOME": "relative"}) == Path("/home/ada/.local/state/samestep/jobs.jsonl")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], JobState("UNKNOWN", "SLURM has forgotten it, and it noted no end")),
        (["started"], JobState("UNKNOWN", "SLURM has forgotten it, and it noted no end")),
        (["started", "ended"], JobState("FAILED", "", 3, 1)),
        (["started", "stopped"], JobState("ENDED", "cancelled or out of time; SLURM has forgotten which", 3, 1)),
        (["ended", "started"], JobState("UNKNOWN", "SLURM has forgotten it, and it noted no end")),
    ],
)
def test_a_job_that_slurm_has_forgotten_is_known_by_its_own_note(events, state, entry, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol here
    lines = [json.dumps({"event": event, "code": 3, "restart": 1, "time": 0}) + "\n" for event in events]
    notes_of(tmp_path, "7").write_text("".join(lines))
    assert how_is(entry) == state


def test_accounts_that_do_not_answer_leave_a_job_unreachable_and_the_list_whole(entry, tmp_path, monkeypatch):
    programs = {
        "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "sacct": f"echo asked >> {shlex.quote(str(tmp_path))}/asked; exec sleep 20",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "_PATIENCE_SECONDS", 0.5)
    assert how_is(entry).state == "UNREACHABLE"
    assert how_is(entry).reason.startswith("sacct has not answered for 0.5 s")
    (tmp_path / "asked").unlink()
    assert [state.state for state in how_are([entry] * 3)] == ["UNREACHABLE"] * 3
    assert (tmp_path / "asked").read_text() == "asked\n"  # and waited for once, not for each job


def test_a_controller_that_does_not_answer_is_asked_once_for_a_whole_list(here, entry, capsys, monkeypatch):
    (here / "scontrol").write_text(
        "#!/bin/sh\necho asked >> asked\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    (here / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    for job in ("7", "8", "9"):
        remember(record_path(os.environ), replace(entry, job=job))
    notes_of(here, "9").write_text('{"event": "ended", "code": 0, "restart": 0, "time": 0}\n')
    assert main(["jobs", "--json"]) == 0
    assert [(each["state"], each["reason"]) for each in json.loads(capsys.readouterr().out)] == [
        ("UNREACHABLE", "Unable to contact slurm controller"),
        ("UNREACHABLE", "Unable to contact slurm controller"),
        ("COMPLETED", ""),
    ]
    assert (here / "asked").read_text() == "asked\n"


def test_jobs_lists_what_was_submitted(here, entry, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out == (
        "no job was submitted yet: `samestep submit train.py` does, and keeps its record in "
        f"{here}/state/samestep/jobs.jsonl\n"
    )
    for job in ("7", "8"):
        remember(record_path(os.environ), replace(entry, job=job, name="[red]a'"))
    notes_of(here, "8").write_text('{"event": "ended", "code": 0, "restart": 2, "time": 0}\n')
    assert main(["jobs", "--last", "1"]) == 0
    header, _, row = (line.split() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert header[:7] == ["job", "name", "submitted", "nodes", "state", "code", "requeued"]
    assert row[:8] == ["8", "[red]a'", "2026-01-31", "09:30", "2", "COMPLETED", "0", "2"]
    assert main(["jobs", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(each["job"], each["state"], each["exit_code"]) for each in entries] == [
        ("7", "UNKNOWN", 1),
        ("8", "COMPLETED", 0),
    ]
    assert entries[0]["log"] == str(log_of(here, "7"))


def test_who_stops_following_is_told_that_the_job_goes_on(here):
    # Programs in SLURM's place: a job that waits for ever would keep a real cluster busy.
    programs = {
        "sbatch": "echo 12",
        "scontrol": r"printf '\n   JobState=PENDING Reason=Resources \n   Requeue=1 Restarts=0 x ExitCode=0:0\n'",
    }
    for name, line in programs.items():
        (here / name).write_text(f"#!/bin/sh\n{line}\n")
        (here / name).chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "samestep", "submit", "--follow", "train.py"],
        env={**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A test runner in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    told = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "12\n")
    assert told[1] == "samestep: job 12 waits: Resources\n"
    assert err == "samestep: job 12 goes on; `scancel 12` ends it\n"


def test_a_log_is_read_on_from_where_it_was_left(tmp_path):
    tail = LogTail(tmp_path / "log")
    assert tail.rest() == b""
    (tmp_path / "log").write_bytes(b"one\n")
    assert (tail.rest(), tail.rest()) == (b"one\n", b"")
    with (tmp_path / "log").open("ab") as file:
        file.write(b"two")
    assert tail.rest() == b"two"
