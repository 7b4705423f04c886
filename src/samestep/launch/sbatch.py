"""The sbatch script of a job: SLURM directives, the job's values, then shell code that starts one launcher per node."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from samestep.environment.world import MAX_LOCAL_RANKS
from samestep.errors import PREEMPTED, LaunchError
from samestep.messages import format_duration, read_integer, shorten

# sbatch options that would contradict the script below, and what to use instead.
_RESERVED = {
    "array": "submit each training separately, with its own --folder",
    "error": "the log of a job is in its --folder",
    "nodes": "use --nodes N",
    "ntasks": "each node runs one launcher; use --nproc-per-node for the number of ranks",
    "ntasks-per-node": "each node runs one launcher; use --nproc-per-node for the number of ranks",
    "open-mode": "a requeued job appends to its log",
    "output": "the log of a job is in its --folder",
    "requeue": "use --requeue or --no-requeue",
    "no-requeue": "use --requeue or --no-requeue",
    "signal": "use --signal-before SECONDS",
    "wait": "use --follow",
    "wrap": "pass a script",
}


@dataclass(frozen=True)
class SlurmJob:
    """What to run on a SLURM cluster, and with which resources; all paths are absolute."""

    target: str  # path of a script, or name of a module
    module: bool  # whether `target` is a module, as in `python -m`
    arguments: tuple[str, ...]
    name: str
    nodes: int
    processes: str  # ranks per node: auto, gpu, cpu or a number, as for `samestep run`
    folder: Path  # of the run, which also contains the log
    directory: Path  # in which the script starts
    python: str  # the interpreter
    folder_is_explicit: bool = True  # if not, run.checkpoint may choose another folder for the run's files
    seconds: int | None = None  # time limit; None uses the default of the partition
    signal_before: int = 120  # seconds before the time limit at which SLURM warns the ranks; 0 for never
    requeue: bool = True  # after preemption, a node failure, or a warning after which the ranks saved
    options: tuple[tuple[str, str | None], ...] = ()  # further sbatch options by long name; None without a value
    variables: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()  # shell lines that run before the ranks start

    def __post_init__(self) -> None:
        if "\\" in str(self.folder) or "\n" in str(self.folder):
            raise LaunchError(
                f"SLURM cannot write a log into {str(self.folder)!r}, since its name contains a backslash or a line "
                "break: choose another --folder"
            )
        if self.seconds is not None and self.signal_before >= self.seconds:
            raise LaunchError(
                f"--signal-before {self.signal_before} is not less than --time {format_duration(self.seconds)} "
                f"({self.seconds} s): pass a smaller number, or 0 for no warning"
            )


def parse_sbatch_option(text: str) -> tuple[str, str | None]:
    """Name and value of an sbatch option, from NAME=VALUE or NAME.

    >>> parse_sbatch_option("reservation=night"), parse_sbatch_option("--contiguous")
    (('reservation', 'night'), ('contiguous', None))
    """
    name, equals, value = text.removeprefix("--").partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name, re.ASCII):
        raise LaunchError(
            f"--sbatch {text} is not an sbatch option: pass NAME=VALUE with its long name, as in "
            "--sbatch reservation=night"
        )
    if name in _RESERVED:
        raise LaunchError(f"--sbatch {text} is set by samestep: {_RESERVED[name]}")
    return name, value if equals else None


def check_resources(gpus: str | None, memory: str | None) -> None:
    """Raise if --gpus-per-node or --mem is not an amount: sbatch accepts some mistakes, and the job waits forever.

    >>> check_resources("a100:4", "64G")
    """
    for part in (gpus or "1").split(","):
        count = read_integer(part.rpartition(":")[2])
        if not re.fullmatch(r"(?:\w[\w.-]*:)?\d+", part, re.ASCII) or not 1 <= (count or 0) <= MAX_LOCAL_RANKS:
            raise LaunchError(
                f"--gpus-per-node {shorten(str(gpus))} is not a number of GPUs: pass N or TYPE:N, with N from 1 to "
                f"{MAX_LOCAL_RANKS}, as in 4 or a100:4"
            )
    if memory is not None and not re.fullmatch(r"\d{1,12}(?:\.\d{1,9})?[KMGT]?B?", memory, re.ASCII | re.IGNORECASE):
        raise LaunchError(
            f"--mem {shorten(memory)} is not an amount of memory: pass a number of MB, or one with K, M, G or T, as in "
            "64G; 0 for all of a node"
        )


def parse_variable(text: str) -> tuple[str, str]:
    """Name and value from NAME=VALUE; the value may contain anything.

    >>> parse_variable("FLAGS=-O2 # fast")
    ('FLAGS', '-O2 # fast')
    """
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
        raise LaunchError(f"--env {text} is not a variable: pass NAME=VALUE, as in --env NCCL_DEBUG=INFO")
    return name, value


def log_path(folder: Path, job_id: str) -> Path:
    """The log of a job: the output of the script and of srun, also after a requeue."""
    return folder / f"slurm-{job_id}.log"


def events_path(folder: Path, job_id: str) -> Path:
    """The file in which a job records its start and its end, one JSON object per line."""
    return folder / f"slurm-{job_id}.jsonl"


def format_sbatch(job: SlurmJob) -> str:
    """The script for sbatch. Its beginning depends on the job; the rest is the same for every job."""
    directives: list[tuple[str, str | None]] = [
        ("job-name", job.name),
        ("nodes", str(job.nodes)),
        ("ntasks-per-node", "1"),
        *([("time", format_duration(job.seconds))] if job.seconds is not None else []),
        *job.options,
        ("output", str(log_path(Path(str(job.folder).replace("%", "%%")), "%j"))),
        ("open-mode", "append"),
        *([("signal", f"B:USR1@{job.signal_before}")] if job.signal_before else []),
        ("requeue" if job.requeue else "no-requeue", None),
    ]
    lines = [f"#SBATCH --{name}{'' if value is None else f'={_quote(name, value)}'}" for name, value in directives]
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
    setup = [f"cd -- {shlex.quote(str(job.directory))} || exit 1", *exports, *job.setup]
    head = ["#!/bin/bash", *lines, "# Written by `samestep submit`; you can submit it again with sbatch.", ""]
    return "\n".join([*head, *setup, "", *values, "", _BODY])


def _quote(name: str, value: str) -> str:
    """Quote a value for sbatch, which is not a shell but handles quotes, backslashes and comments (#)."""
    if "\n" in value or "\r" in value:
        raise LaunchError(f"--{name} {value!r} contains a line break, which sbatch does not support: remove it")
    if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# The batch shell runs on node 0 only. It keeps srun in the background, since a shell that waits for a foreground child
# handles no signal before the child ends. Its variables begin with _ so that they do not collide with the user's.
_BODY = f"""\
record() {{
  printf '{{"event": "%s", "code": %d, "restart": %d, "time": %d}}\\n' \\
    "$1" "$2" "${{SLURM_RESTART_COUNT:-0}}" "$(date +%s)" >> "$_folder/slurm-$SLURM_JOB_ID.jsonl"
}}
record started 0

# SLURM numbers the nodes, and their number is fixed, so no elastic rendezvous is needed: the launchers connect to node
# 0, by its name, or by SLURM's address for it if the name cannot be resolved.
_host=${{SAMESTEP_HOST:-}}
if [ -z "$_host" ]; then
  _host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  getent hosts "$_host" > /dev/null || _host=$(scontrol show node "$_host" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
fi
_port=${{SAMESTEP_PORT:-$((10000 + SLURM_JOB_ID * 97 % 19000))}}  # differs per job; below the ephemeral ports

# The warning reaches every process of a step. A process that does not handle it must ignore it, or it would die.
_launcher='trap "" USR1; exec "$0" -m samestep run --node-rank "$SLURM_NODEID" "$@"'

_step= _interrupted= _stopped=
warn() {{
  _interrupted=yes
  echo "samestep: SLURM sent a warning; forwarding it to the ranks" >&2
  [ -z "$_step" ] || kill -USR1 "$_step"
}}
trap warn USR1
trap '_interrupted=yes _stopped=yes' TERM
# One task runs all ranks of its node, so it must not be bound to one core. After a launcher has failed, the others get
# a minute to end by themselves, so that their exit codes are kept.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --export=ALL \\
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} --kill-on-bad-exit=0 --wait=60 \\
  bash -c "$_launcher" "$_python" --nnodes "$SLURM_JOB_NUM_NODES" --master-addr "$_host" --master-port "$_port" \\
  --rdzv-id "$SLURM_JOB_ID" "${{_options[@]}}" -- "${{_script[@]}}" &
_step=$!
while :; do
  _interrupted= _code=0
  wait "$_step" || _code=$?
  [ -n "$_interrupted" ] || break  # if interrupted, a signal ended the wait, not srun
done

running() {{ scontrol show job "$SLURM_JOB_ID" | grep -q '^ *JobState=RUNNING '; }}
# Ranks also save after SIGTERM, but a cancelled job must not be requeued.
if [ "$_code" -eq {PREEMPTED} ] && [ "$_requeue" = yes ] && [ -z "$_stopped" ] && running; then
  record requeued "$_code"
  echo "samestep: the ranks have saved after the warning; requeueing job $SLURM_JOB_ID" >&2
  scontrol requeue "$SLURM_JOB_ID" && exit "$_code"
fi
if [ -n "$_stopped" ]; then record stopped "$_code"; else record ended "$_code"; fi
exit "$_code"
"""
