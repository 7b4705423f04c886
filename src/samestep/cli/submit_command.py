"""`samestep submit`: write a file for sbatch, submit it, and say which job it became."""

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TypedDict, Unpack

import click

from samestep.environment.world import read_environ
from samestep.errors import LaunchError
from samestep.launch.job import check_module, check_script, count_processes, folder_name, make_folder, read_time_limit
from samestep.launch.sbatch import SlurmJob, log_of, read_asked, read_variable, sbatch_text
from samestep.launch.slurm import Submitted, check_sbatch, follow, record_path, remember, submit

_FILE = "slurm.sbatch"
# Options that sbatch knows by the same name.
_SAME = ("partition", "account", "qos", "gpus_per_node", "cpus_per_task", "mem", "constraint")


class Typed(TypedDict):
    """What was typed, by the names that the options below give it."""

    module: bool
    nodes: int
    processes: str
    gpus_per_node: str | None
    cpus_per_task: int | None
    mem: str | None
    time: str | None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclusive: bool
    job_name: str | None
    folder: Path | None
    requeue: bool
    warning: int
    setup: tuple[str, ...]
    variables: tuple[str, ...]
    asked: tuple[str, ...]
    dry_run: bool
    following: bool
    script: tuple[str, ...]


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


@click.command(
    context_settings={
        # Options may stand on either side of the script; underscores are as good as dashes, as for `samestep run`.
        "token_normalize_func": _with_dashes,
        "help_option_names": ["-h", "--help"],
    },
    epilog="What follows `--` is the script's own. Example: samestep submit train.py --nodes 2 --gpus-per-node 4 "
    "--time 4:00:00 -- --lr 0.1",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    "--nodes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Nodes of the job."
)
@click.option(
    "--nproc-per-node", "processes", default="auto", show_default=True, metavar="auto|gpu|cpu|N",
    help="Ranks on each node; auto: one for each GPU, or one for two cores.",
)  # fmt: skip
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs on each node.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), metavar="N", help="Cores on each node, for all its ranks.")
@click.option("--mem", metavar="SIZE", help="Memory on each node, as in 64G.")
@click.option("--time", metavar="LIMIT", help="Time limit, as in 4:00:00, 1-12:00:00 or 3h55m.")
@click.option("--partition", metavar="NAME", help="Where in the cluster.")
@click.option("--account", metavar="NAME", help="Who pays for it.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option("--constraint", metavar="FEATURES", help="What the nodes must offer, as in 'a100&nvlink'.")
@click.option("--exclusive", is_flag=True, help="Share the nodes with no other job.")
@click.option("--job-name", metavar="NAME", help="What SLURM calls it; default the script's name.")
@click.option("--folder", type=click.Path(path_type=Path), help="The run's folder; default runs/SCRIPT-DATE-TIME.")
@click.option("--requeue/--no-requeue", default=True, show_default=True,
              help="Whether it goes back into the queue after preemption or an obeyed warning.")  # fmt: skip
@click.option("--signal-before", "warning", type=click.IntRange(0, 65535), default=120, show_default=True,
              metavar="SECONDS", help="Warn the ranks so long before the time limit; 0: not at all.")  # fmt: skip
@click.option(
    "--setup", multiple=True, metavar="LINE", help="Shell to run first, as in 'module load cuda'; repeatable."
)
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable of the job; repeatable.")
@click.option("--sbatch", "asked", multiple=True, metavar="NAME=VALUE", help="Any other option of sbatch; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the file; write and submit nothing.")
@click.option("--follow", "following", is_flag=True, help="Show the log until the job ends; exit with its code.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**typed: Unpack[Typed]) -> int:
    """Submit SCRIPT to SLURM as ranks that train together; prints the job's id."""
    if not typed["script"]:
        raise LaunchError(
            "no script was named: type `samestep submit train.py`, or `samestep submit -m package.module`"
        )
    (check_module if typed["module"] else check_script)(typed["script"][0])
    count_processes(typed["processes"], gpus=1, cores=1)  # a mistyped number is told here, not by the job hours later
    now = datetime.now().astimezone()
    name = folder_name(typed["script"][0], now)
    if typed["dry_run"]:
        click.echo(sbatch_text(_decide(typed, typed["folder"] or Path("runs") / name)), nl=False)
        return 0
    check_sbatch()
    sbatch_text(_decide(typed, Path(name)))  # a mistake leaves no folder behind
    job = _decide(typed, make_folder(typed["folder"], name))
    submitted = _submit(job, now)
    click.echo(submitted.job)
    _remember(submitted)
    _say(f"samestep: job {submitted.job} is submitted; its log will be {log_of(job.folder, submitted.job)}")
    return _follow(submitted) if typed["following"] else 0


def _decide(typed: Typed, folder: Path) -> SlurmJob:
    target, *arguments = typed["script"]
    own = [(name.replace("_", "-"), str(typed[name])) for name in _SAME if typed[name] is not None]
    return SlurmJob(
        target=target,
        module=typed["module"],
        arguments=tuple(arguments),
        name=typed["job_name"] or (Path(target).stem if not typed["module"] else target),
        nodes=typed["nodes"],
        processes=typed["processes"],
        folder=folder.absolute(),
        folder_is_explicit=typed["folder"] is not None,
        directory=Path.cwd(),
        python=sys.executable,
        seconds=None if typed["time"] is None else read_time_limit("--time", typed["time"]),
        warning=typed["warning"],
        requeue=typed["requeue"],
        asked=(*own, *([("exclusive", None)] if typed["exclusive"] else []), *map(read_asked, typed["asked"])),
        variables=tuple(map(read_variable, typed["variables"])),
        setup=typed["setup"],
    )


def _submit(job: SlurmJob, now: datetime) -> Submitted:
    file = job.folder / _FILE
    file.write_text(sbatch_text(job))
    return Submitted(
        job=submit(file),
        name=job.name,
        submitted=now.isoformat(timespec="seconds"),
        nodes=job.nodes,
        folder=str(job.folder),
        file=str(file),
        command=(job.target, *job.arguments),
    )


def _remember(submitted: Submitted) -> None:
    try:
        remember(record_path(read_environ()), submitted)
    except LaunchError as error:  # the job is submitted all the same
        _say(f"samestep: {error}")


def _follow(submitted: Submitted) -> int:
    try:
        ended = follow(submitted, _show, _say)
    except KeyboardInterrupt:
        _say(f"samestep: job {submitted.job} goes on; `scancel {shlex.quote(submitted.job)}` ends it")
        return 130
    reason = f" ({ended.reason})" if ended.reason else ""
    _say(f"samestep: job {submitted.job} ended: {ended.state}{reason}, exit code {ended.exit_code}")
    return ended.exit_code


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
