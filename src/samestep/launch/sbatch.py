"""The file that sbatch gets: what is asked of SLURM, then a shell script that starts one launcher a node."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import LaunchError
from samestep.launch.failure_report import PREEMPTED
from samestep.messages import format_duration

# Options of sbatch that would contradict what the script below relies on, and what to do instead.
_OWN = {
    "array": "submit each training by itself, with a --folder of its own",
    "error": "the log of a job is in its --folder",
    "nodes": "type --nodes N",
    "ntasks": "each node runs one launcher: type --nproc-per-node for the ranks it starts",
    "ntasks-per-node": "each node runs one launcher: type --nproc-per-node for the ranks it starts",
    "open-mode": "a job that is requeued writes on in its log",
    "output": "the log of a job is in its --folder",
    "requeue": "type --requeue or --no-requeue",
    "no-requeue": "type --requeue or --no-requeue",
    "signal": "type --signal-before SECONDS",
    "wait": "type --follow",
    "wrap": "name a script",
}
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*-]+", re.ASCII)


@dataclass(frozen=True)
class SlurmJob:
    """What to run on a SLURM cluster, and what to ask the cluster for."""

    target: str
    """Path of a script, or name of a module."""
    module: bool
    """Whether `target` is a module, as in `python -m`."""
    arguments: tuple[str, ...]
    """What the script gets, untouched."""
    name: str
    """What SLURM calls the job."""
    nodes: int
    """How many nodes it gets."""
    processes: str
    """Ranks on each node: auto, gpu, cpu or a number, as for `samestep run`."""
    folder: Path
    """Absolute path of the run's folder; the log lies there too."""
    directory: Path
    """Absolute path of the folder in which the script starts."""
    python: str
    """Absolute path of the interpreter."""
    folder_is_explicit: bool = True
    """Whether the user named the folder; else run.checkpoint may move what the ranks write to its own."""
    seconds: int | None = None
    """Time limit; None takes the partition's own."""
    warning: int = 120
    """Seconds before the time limit at which the ranks are warned; 0 for no warning."""
    requeue: bool = True
    """Whether the job goes back into the queue after preemption, a failed node, or a warning that its ranks obeyed."""
    asked: tuple[tuple[str, str | None], ...] = ()
    """Further options of sbatch, by their long names; None for one without a value."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the job's environment."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run before the ranks start, as they are."""


def read_asked(text: str) -> tuple[str, str | None]:
    """Name and value of a further option of sbatch, from NAME=VALUE or NAME.

    >>> read_asked("reservation=night"), read_asked("--contiguous")
    (('reservation', 'night'), ('contiguous', None))
    """
    name, equals, value = text.removeprefix("--").partition("=")
    if _NAME.fullmatch(name) is None:
        raise LaunchError(
            f"--sbatch {text} is not an option of sbatch: type NAME=VALUE with its long name, as in "
            "--sbatch reservation=night"
        )
    if name in _OWN:
        raise LaunchError(f"--sbatch {text} is for samestep to decide: {_OWN[name]}")
    return name, value if equals else None


def read_variable(text: str) -> tuple[str, str]:
    """Name and value from NAME=VALUE; the value may hold anything.

    >>> read_variable("FLAGS=-O2 # fast")
    ('FLAGS', '-O2 # fast')
    """
    name, equals, value = text.partition("=")
    if not equals or _VARIABLE.fullmatch(name) is None:
        raise LaunchError(f"--env {text} is not a variable: type NAME=VALUE, as in --env NCCL_DEBUG=INFO")
    return name, value


def sbatch_text(job: SlurmJob) -> str:
    """The file for sbatch. What belongs to one job stands above; the rest is the same for every job."""
    _check(job)
    directives = [f"#SBATCH --{name}{'' if value is None else f'={_quote(name, value)}'}" for name, value in _ask(job)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables]
    flags = {"--folder-is-default": not job.folder_is_explicit, "--module": job.module}
    options = ["--nproc-per-node", job.processes, "--folder", str(job.folder), *(name for name in flags if flags[name])]
    values = [
        f"_python={shlex.quote(job.python)}",
        f"_folder={shlex.quote(str(job.folder))}",
        f"_options=({shlex.join(options)})",
        f"_script=({shlex.join([job.target, *job.arguments])})",
        f"_requeue={'yes' if job.requeue else 'no'}",
    ]
    before = [f"cd -- {shlex.quote(str(job.directory))} || exit 1", *exports, *job.setup]
    head = ["#!/bin/bash", *directives, "# Written by `samestep submit`; sbatch takes it again.", ""]
    return "\n".join([*head, *before, "", *values, "", _BODY])


def log_of(folder: Path, job: str) -> Path:
    """Where a job's log lies: what the script and srun print, also after a requeue."""
    return folder / f"slurm-{job}.log"


def notes_of(folder: Path, job: str) -> Path:
    """Where a job notes when it started and how it ended, one line of JSON each."""
    return folder / f"slurm-{job}.jsonl"


def _check(job: SlurmJob) -> None:
    if "\\" in str(job.folder) or "\n" in str(job.folder):
        raise LaunchError(
            f"SLURM cannot write a log into {str(job.folder)!r}, whose name holds a backslash or a line break: name "
            "another --folder"
        )
    if job.seconds is not None and job.warning >= job.seconds:
        raise LaunchError(
            f"--signal-before {job.warning} leaves nothing of --time {format_duration(job.seconds)}, which is "
            f"{job.seconds} s: type a smaller number, or 0 for no warning"
        )


def _ask(job: SlurmJob) -> list[tuple[str, str | None]]:
    return [
        ("job-name", job.name),
        ("nodes", str(job.nodes)),
        ("ntasks-per-node", "1"),
        *([("time", format_duration(job.seconds))] if job.seconds is not None else []),
        *job.asked,
        ("output", str(log_of(Path(str(job.folder).replace("%", "%%")), "%j"))),
        ("open-mode", "append"),
        *([("signal", f"B:USR1@{job.warning}")] if job.warning else []),
        ("requeue" if job.requeue else "no-requeue", None),
    ]


def _quote(name: str, value: str) -> str:
    """A value as sbatch reads it: no shell, but quotes, backslashes and a # that begins a comment."""
    if "\n" in value or "\r" in value:
        raise LaunchError(f"--{name} {value!r} has a line break, which no option of sbatch can hold: leave it out")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# The batch shell runs on the first node only. It keeps srun in the background, since a shell that waits for a child in
# the foreground sees no signal before the child ends. Its variables begin with _, so that they are none of the user's.
_BODY = f"""\
note() {{
  printf '{{"event": "%s", "code": %d, "restart": %d, "time": %d}}\\n' \\
    "$1" "$2" "${{SLURM_RESTART_COUNT:-0}}" "$(date +%s)" >> "$_folder/slurm-$SLURM_JOB_ID.jsonl"
}}
note started 0

# The launchers meet on the first node: by its name, or by the address that SLURM uses where the name means nothing.
_host=${{SAMESTEP_HOST:-}}
if [ -z "$_host" ]; then
  _host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  getent hosts "$_host" > /dev/null || _host=$(scontrol show node "$_host" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
fi
_port=${{SAMESTEP_PORT:-$((10000 + SLURM_JOB_ID * 97 % 19000))}}  # another for each job, below those of other programs

# The warning reaches every process of a step. Whoever does not listen for it must ignore it, or would die of it.
_launcher='trap "" USR1; exec "$0" -m samestep run --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"'

_step= _interrupted= _stopped=
warn() {{
  _interrupted=yes
  echo "samestep: warned by SLURM; the ranks are told" >&2
  [ -z "$_step" ] || kill -USR1 "$_step"
}}
trap warn USR1
trap '_interrupted=yes _stopped=yes' TERM
# One task holds all ranks of its node, so it must not be bound to one core. When a launcher has failed, the others get
# a minute to end by themselves: their exit codes say more than a kill.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --export=ALL \\
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} --kill-on-bad-exit=0 --wait=60 \\
  bash -c "$_launcher" "$_python" --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$_host:$_port" \\
  --rdzv-id "$SLURM_JOB_ID" "${{_options[@]}}" -- "${{_script[@]}}" &
_step=$!
while :; do
  _interrupted= _code=0
  wait "$_step" || _code=$?
  [ -n "$_interrupted" ] || break  # else a signal ended the wait, not srun
done

running() {{ scontrol show job "$SLURM_JOB_ID" | grep -q '^ *JobState=RUNNING '; }}
# Ranks may obey SIGTERM as they obey the warning, but a job that was cancelled must not come back.
if [ "$_code" -eq {PREEMPTED} ] && [ "$_requeue" = yes ] && [ -z "$_stopped" ] && running; then
  note requeued "$_code"
  echo "samestep: the ranks were warned and can go on: job $SLURM_JOB_ID goes back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID" && exit "$_code"
fi
if [ -n "$_stopped" ]; then note stopped "$_code"; else note ended "$_code"; fi
exit "$_code"
"""
