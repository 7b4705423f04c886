"""`samestep submit` and `samestep jobs`: the sbatch script, rejected options, the list of jobs and their states."""

import doctest
import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.environment.world import cache_folder, port_of
from samestep.errors import LaunchError
from samestep.launch import job, rendezvous, sbatch, slurm
from samestep.launch.job import read_time_limit
from samestep.launch.sbatch import (
    SlurmJob,
    events_path,
    format_sbatch,
    log_path,
    parse_sbatch_option,
    parse_variable,
)
from samestep.launch.slurm import (
    JobState,
    StateQuery,
    SubmittedJob,
    add_to_job_list,
    job_list_path,
    parse_sacct,
    parse_scontrol,
    read_job_list,
    show_log,
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
    signal_before=300,
    options=(("partition", "gpu,big"), ("gpus-per-node", "a100:4"), ("constraint", "a100&nvlink"), ("exclusive", None)),
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
    signal_before=0,
    variables=(("TEXT", "x'; echo foo\n#y"),),
)
JOBS = {"plain": PLAIN, "full": FULL, "odd": ODD}
OPTIONS = (
    "--account, --constraint, --cpus-per-task, --dry-run, --env, --exclusive, --folder, --follow, --gpus-per-node, "
    "--help, --job-name, --mem, --module, --nodes, --nproc-per-node, --partition, --qos, --requeue, --sbatch, --setup, "
    "--signal-before, --time"
)
FORMS = "pass hours, minutes and seconds as in 4:00:00 or 3h55m, with days as in 1-12:00:00 or 1d12h, or a number of"

# Arguments of `samestep submit`, in a folder with train.py.
MISTAKES = [
    ([], "no script given: run `samestep submit train.py`, or `samestep submit -m package.module`"),
    (["train.py", "--fast"], f"unknown option --fast: use one of {OPTIONS}; put options of the script after `--`\n"),
    (["nope.py"], "script nope.py not found in HERE; scripts there: train.py\n"),
    (["-m", "nope"], "module nope not found: nope is neither in HERE nor installed; pass the dotted name"),
    (["--nodes", "0", "train.py"], "--nodes must be an integer from 1 to 1000000, got 0\n"),
    (
        ["--gpus-per-node", "-4", "train.py"],
        "--gpus-per-node -4 is not a number of GPUs: pass N or TYPE:N, with N from 1 to",
    ),
    (
        ["--mem", "-4G", "train.py"],
        "--mem -4G is not an amount of memory: pass a number of MB, or one with K, M, G or T, as",
    ),
    (
        ["--nproc-per-node", "two", "train.py"],
        "--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got two\n",
    ),
    (["--time", "soon", "train.py"], f"--time soon is not a time limit: {FORMS} minutes\n"),
    (["--time", "0", "train.py"], f"--time 0 is not a time limit: {FORMS} minutes\n"),
    (["--time", "1:99:00", "train.py"], f"--time 1:99:00 is not a time limit: {FORMS} minutes\n"),
    (
        ["--time", "2m", "train.py"],
        "--signal-before 120 is not less than --time 2:00 (120 s): pass a smaller number, or 0 for no warning\n",
    ),
    (["--env", "A", "train.py"], "--env A is not a variable: pass NAME=VALUE, as in --env NCCL_DEBUG=INFO\n"),
    (["--env", "a-b=1", "train.py"], "--env a-b=1 is not a variable: pass NAME=VALUE, as in --env NCCL_DEBUG=INFO\n"),
    (
        ["--sbatch", "-p gpu", "train.py"],
        "--sbatch -p gpu is not an sbatch option: pass NAME=VALUE with its long name, as in "
        "--sbatch reservation=night\n",
    ),
    (
        ["--sbatch", "ntasks=4", "train.py"],
        "--sbatch ntasks=4 is set by samestep: each node runs one launcher; use --nproc-per-node for the number of "
        "ranks\n",
    ),
    (
        ["--job-name", "a\nb", "train.py"],
        "--job-name 'a\\nb' contains a line break, which sbatch does not support: remove it\n",
    ),
    (
        ["--folder", "a\\b", "train.py"],
        "SLURM cannot write a log into 'HERE/a\\\\b', since its name contains a backslash or a line break: "
        "choose another --folder\n",
    ),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("module", [job, rendezvous, sbatch, slurm])
def test_the_examples_in_the_docstrings_pass(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("name", JOBS)
def test_the_script_matches_the_golden_file(name):
    golden = GOLDEN / f"{name}.sbatch"
    text = format_sbatch(JOBS[name])
    if "SAMESTEP_WRITE_GOLDEN" in os.environ:  # after an intended change; check it with git diff
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_a_shell_reads_every_value_unchanged(name, tmp_path):
    job = JOBS[name]
    # Without the part that is the same for every job, which calls SLURM.
    values = format_sbatch(job).partition("\nrecord() {")[0].replace("cd -- ", "true -- ")
    setup = "\n".join(job.setup)
    show = 'printf "%s\\0" "$_python" "$_folder" "${_options[@]}" "${_script[@]}" "$_requeue" "${TEXT-}"'
    done = subprocess.run(
        ["bash", "-c", f"{values.replace(setup, '') if setup else values}\n{show}"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    options = ["--nproc-per-node", job.processes, "--folder", str(job.folder), *(["--module"] * job.module)]
    requeue, value = "yes" if job.requeue else "no", dict(job.variables).get("TEXT", "")
    assert done.stdout.split("\0")[:-1] == [
        job.python, str(job.folder), *options, job.target, *job.arguments, requeue, value,
    ]  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize("job", [1, 42, 195, 196, 123_456_789])
def test_the_script_and_the_ranks_of_srun_derive_the_same_port(job):
    (line,) = [line for line in format_sbatch(PLAIN).splitlines() if line.startswith("_port=")]
    command = ["bash", "-c", f'{line}\necho "$_port"']
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"SLURM_JOB_ID": str(job)})
    assert int(done.stdout) == port_of(job, 0)


def test_a_dry_run_prints_the_script_and_writes_nothing(here, capsys):
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


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(each) for each, _ in MISTAKES])
def test_a_mistake_is_reported_in_one_line_and_nothing_is_written(arguments, message, here, capsys):
    assert main(["submit", "--dry-run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("samestep: " + message.replace("HERE", str(here)))
    assert err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_without_sbatch_the_error_says_where_to_submit(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert main(["submit", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "samestep: sbatch is not installed on this machine: submit from a login node of the cluster, pass --dry-run to "
        "print the script, or use `samestep run` to train here\n"
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
def test_time_limits_are_read_in_the_formats_of_slurm_and_with_units(text, seconds):
    assert read_time_limit("--time", text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "1:2:3:4", "4h30", "1.5h", "h", "UNLIMITED", "1-", "\u0663"])
def test_an_invalid_time_limit_is_rejected_with_the_option(text):
    with pytest.raises(LaunchError, match=r"^--time-limit .*is not a time limit: pass hours"):
        read_time_limit("--time-limit", text)


def test_sbatch_options_and_variables_keep_their_values():
    assert parse_sbatch_option("comment=a=b # c") == ("comment", "a=b # c")
    assert parse_sbatch_option("--contiguous") == ("contiguous", None)
    assert parse_variable("A=") == ("A", "")


def test_a_job_name_is_not_mistaken_for_a_state():
    text = (
        "JobId=5 JobName=x JobState=COMPLETED Reason=None\n"
        "   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)\n"
        "   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:9\n   WorkDir=/x ExitCode=0:0\n"
    )
    assert parse_scontrol(text) == JobState("FAILED", "NonZeroExitCode", 137, 2)
    assert parse_scontrol("No jobs in the system\n") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED|0:0|1\n", JobState("COMPLETED", "", 0, 1)),
        ("FAILED|3:0|0\n", JobState("FAILED", "", 3, 0)),
        ("TIMEOUT|0:0|Unknown\n", JobState("TIMEOUT", "", 0, 0)),
        ("", None),
    ],
)
def test_the_output_of_accounting_is_parsed(text, state):
    assert parse_sacct(text) == state


def test_only_a_completed_job_has_exit_code_0():
    assert [JobState(state).exit_code for state in ("COMPLETED", "CANCELLED", "TIMEOUT", "UNKNOWN")] == [0, 1, 1, 1]
    assert [JobState(state).ended for state in ("PENDING", "RUNNING", "UNREACHABLE", "TIMEOUT")] == [False] * 3 + [True]


@pytest.fixture
def entry(tmp_path: Path) -> SubmittedJob:
    return SubmittedJob("7", "train", "2026-01-31T09:30:05+01:00", 2, str(tmp_path), "f", ("train.py", "--lr"))


def test_the_job_list_is_read_back_without_an_incomplete_line(entry, tmp_path):
    path = tmp_path / "state" / "jobs.jsonl"
    add_to_job_list(path, entry)
    with path.open("a") as file:
        file.write('{"job_id": "8", "na\n')
    add_to_job_list(path, replace(entry, job_id="9"))
    assert read_job_list(path) == ([entry, replace(entry, job_id="9")], 1)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"9" * 5000,
        b"[" * 100_000,
        b'{"job_id": "8"}',
        b'{"job_id": "8", "submitted_at": "2026-01-31", "unknown": "a field of another version"}',
        {"job_id": 8},
        {"job_id": "--help"},
        {"name": None},
        {"submitted_at": "yesterday"},
        {"submitted_at": 5},
        {"nodes": "two"},
        {"folder": 3},
        {"command": 7},
        {"command": "train.py"},
        {"command": [7]},
    ],
)
def test_a_line_that_is_not_a_job_is_skipped_and_reported(line, entry, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    path = job_list_path(os.environ)
    add_to_job_list(path, entry)
    text = line if isinstance(line, bytes) else json.dumps({**json.loads(path.read_text()), **line}).encode()
    path.write_bytes(path.read_bytes() + text + b"\n\n")
    assert main(["jobs", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [job["job_id"] for job in json.loads(out)] == ["7"]
    assert err == f"samestep: skipped 1 line(s) of {path} that are not jobs: remove them\n"


def test_a_field_of_a_later_version_is_ignored(entry, tmp_path):
    path = tmp_path / "jobs.jsonl"
    add_to_job_list(path, entry)
    path.write_text(json.dumps({**json.loads(path.read_text()), "cluster": "new"}))
    assert read_job_list(path) == ([entry], 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, "is not a file: remove it"),
        (os.mkfifo, "is not a file: remove it"),
        (
            lambda path: path.symlink_to("/proc/self/mem"),
            r"cannot be read \(Input/output error\): change its permissions",
        ),
    ],
)
def test_a_job_list_that_is_not_a_file_or_cannot_be_read(make, message, tmp_path):
    make(tmp_path / "jobs.jsonl")
    with pytest.raises(LaunchError, match=f"^the list of submitted jobs {tmp_path}/jobs.jsonl {message}"):
        read_job_list(tmp_path / "jobs.jsonl")


def test_a_user_without_a_home_directory_learns_which_variable_to_set(monkeypatch, capsys):
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["jobs"]) == 2
    assert capsys.readouterr().err == (
        f"samestep: your user id {os.getuid()} has no home directory for the list of submitted jobs: set "
        "XDG_STATE_HOME or HOME to a writable folder\n"
    )
    assert cache_folder() == Path(tempfile.gettempdir(), f"samestep-{os.getuid()}")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/home/ada"}) == Path("/home/ada/.cache/samestep")


@pytest.mark.parametrize(
    "last", ["x", "[]", '{"event": "ended", "code": "abc", "restart": 0}', '{"event": "ended", "code": 1e400}']
)
def test_a_record_of_a_job_that_is_garbage_is_ignored(last, entry, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    events_path(tmp_path, "7").write_text(last)
    assert StateQuery().state(entry) == JobState(
        "UNKNOWN", "SLURM has no record of it any more, and it recorded no end"
    )


def test_a_job_list_that_cannot_be_written_is_reported_with_the_job(entry, tmp_path):
    (tmp_path / "state").touch()
    with pytest.raises(LaunchError, match=r"^job 7 is submitted, but .* cannot be written .*: set XDG_STATE_HOME"):
        add_to_job_list(tmp_path / "state" / "jobs.jsonl", entry)


def test_the_job_list_is_in_the_state_folder_of_the_user():
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        expected = Path("/home/ada/.local/state/samestep/jobs.jsonl")
        assert job_list_path({"HOME": "/home/ada", **environ}) == expected
        assert job_list_path({"HOME": "", **environ}) == Path(pwd.getpwuid(os.getuid()).pw_dir, *expected.parts[3:])


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], JobState("UNKNOWN", "SLURM has no record of it any more, and it recorded no end")),
        (["started"], JobState("UNKNOWN", "SLURM has no record of it any more, and it recorded no end")),
        (["started", "ended"], JobState("FAILED", "", 3, 1)),
        (["started", "stopped"], JobState("ENDED", "cancelled or timed out; SLURM has no record of it any more", 3, 1)),
        (["ended", "started"], JobState("UNKNOWN", "SLURM has no record of it any more, and it recorded no end")),
    ],
)
def test_the_state_of_an_old_job_comes_from_its_own_record(events, state, entry, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol here
    lines = [json.dumps({"event": event, "code": 3, "restart": 1, "time": 0}) + "\n" for event in events]
    events_path(tmp_path, "7").write_text("".join(lines))
    assert StateQuery().state(entry) == state


def test_a_job_is_unreachable_if_accounting_does_not_answer(entry, tmp_path, monkeypatch):
    programs = {
        "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "sacct": f"echo called >> {shlex.quote(str(tmp_path))}/calls; exec sleep 20",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "_TIMEOUT_SECONDS", 0.5)
    assert StateQuery().state(entry).state == "UNREACHABLE"
    assert StateQuery().state(entry).reason.startswith("sacct did not answer within 0.5 s")
    (tmp_path / "calls").unlink()
    query = StateQuery()
    assert [query.state(entry).state for _ in range(3)] == ["UNREACHABLE"] * 3
    assert (tmp_path / "calls").read_text() == "called\n"  # called once, not once per job


def test_a_controller_that_does_not_answer_is_called_once_for_the_whole_list(here, entry, capsys, monkeypatch):
    (here / "scontrol").write_text(
        "#!/bin/sh\necho called >> calls\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    (here / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    for number in ("7", "8", "9"):
        add_to_job_list(job_list_path(os.environ), replace(entry, job_id=number))
    events_path(here, "9").write_text('{"event": "ended", "code": 0, "restart": 0, "time": 0}\n')
    assert main(["jobs", "--json"]) == 0
    assert [(each["state"], each["reason"]) for each in json.loads(capsys.readouterr().out)] == [
        ("UNREACHABLE", "Unable to contact slurm controller"),
        ("UNREACHABLE", "Unable to contact slurm controller"),
        ("COMPLETED", ""),
    ]
    assert (here / "calls").read_text() == "called\n"


def test_jobs_lists_the_submitted_jobs(here, entry, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out == (
        "no jobs submitted yet: submit one with `samestep submit train.py` (jobs are listed in "
        f"{here}/state/samestep/jobs.jsonl)\n"
    )
    for number in ("7", "8"):
        add_to_job_list(job_list_path(os.environ), replace(entry, job_id=number, name="[red]a'"))
    events_path(here, "8").write_text('{"event": "ended", "code": 0, "restart": 2, "time": 0}\n')
    assert main(["jobs", "--last", "1"]) == 0
    header, _, row = (line.split() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert header[:7] == ["job", "name", "submitted", "nodes", "state", "code", "requeued"]
    assert row[:8] == ["8", "[red]a'", "2026-01-31", "09:30", "2", "COMPLETED", "0", "2"]
    assert main(["jobs", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(each["job_id"], each["state"], each["exit_code"]) for each in entries] == [
        ("7", "UNKNOWN", 1),
        ("8", "COMPLETED", 0),
    ]
    assert entries[0]["log"] == str(log_path(here, "7"))


def test_ctrl_c_ends_following_but_not_the_job(here):
    # Scripts in place of SLURM, with a job that waits forever.
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
        # Children of a test runner in the background of a shell would ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "12\n")
    assert lines[1] == "samestep: job 12 is waiting: Resources\n"
    assert err == "samestep: job 12 continues; cancel it with `scancel 12`\n"


def test_a_log_is_read_from_the_last_position(tmp_path):
    shown: list[bytes] = []
    assert (show_log(tmp_path / "log", 0, shown.append), shown) == (0, [])
    (tmp_path / "log").write_bytes(b"one\n")
    assert (show_log(tmp_path / "log", 0, shown.append), shown) == (4, [b"one\n"])
    assert (show_log(tmp_path / "log", 4, shown.append), shown) == (4, [b"one\n"])
    with (tmp_path / "log").open("ab") as file:
        file.write(b"two")
    assert (show_log(tmp_path / "log", 4, shown.append), shown) == (7, [b"one\n", b"two"])
