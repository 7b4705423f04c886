"""`samestep submit`: write an sbatch script, submit it, and print the job's id."""

import shlex
import sys
from codecs import getincrementaldecoder
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import click

from samestep.cli.main import NumberRange, accept_underscores, output_failure
from samestep.environment.world import MAX_LOCAL_RANKS, MAX_RANKS, read_environ
from samestep.errors import LaunchError
from samestep.launch.job import check_target, count_processes, folder_name, make_folder, read_time_limit
from samestep.launch.sbatch import (
    SlurmJob,
    check_resources,
    format_sbatch,
    log_path,
    parse_sbatch_option,
    parse_variable,
)
from samestep.launch.slurm import SubmittedJob, add_to_job_list, check_sbatch, follow, job_list_path, submit

_echo = partial(click.echo, err=True)


@click.command(
    context_settings={"token_normalize_func": accept_underscores},  # options may come before or after the script
    epilog="Arguments of the script come after `--`. Example: samestep submit train.py --nodes 2 --gpus-per-node 4 "
    "--time 4:00:00 -- --lr 0.1",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    "--nodes", type=NumberRange(1, MAX_RANKS), default=1, show_default=True, metavar="N", help="Number of nodes."
)
@click.option(
    "--nproc-per-node", "processes", default="auto", show_default=True, metavar="auto|gpu|cpu|N",
    help="Number of ranks per node; auto: one per GPU, or one per two cores without GPUs.",
)  # fmt: skip
@click.option("--gpus-per-node", "gpus", metavar="[TYPE:]N", help="GPUs per node.")
@click.option(
    "--cpus-per-task", type=NumberRange(1, MAX_LOCAL_RANKS), metavar="N", help="Cores per node, for all its ranks."
)
@click.option("--mem", "memory", metavar="SIZE", help="Memory per node, as in 64G.")
@click.option("--time", metavar="LIMIT", help="Time limit, as in 4:00:00, 1-12:00:00 or 3h55m.")
@click.option("--partition", metavar="NAME", help="SLURM partition.")
@click.option("--account", metavar="NAME", help="SLURM account.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option("--constraint", metavar="FEATURES", help="Required features of the nodes, as in 'a100&nvlink'.")
@click.option("--exclusive", is_flag=True, help="Do not share the nodes with other jobs.")
@click.option("--job-name", metavar="NAME", help="Name of the job; default the script's name.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of the run; default runs/SCRIPT-DATE-TIME.")
@click.option("--requeue/--no-requeue", default=True, show_default=True,
              help="Requeue the job after preemption, or after its ranks saved because of a warning.")  # fmt: skip
@click.option("--signal-before", type=NumberRange(0, 65535), default=120, show_default=True, metavar="SECONDS",
              help="Warn the ranks this long before the time limit; 0 for no warning.")  # fmt: skip
@click.option(
    "--setup", multiple=True, metavar="LINE", help="Shell line to run first, as in 'module load cuda'; repeatable."
)
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable of the job; repeatable.")
@click.option("--sbatch", "extra", multiple=True, metavar="NAME=VALUE", help="Any other sbatch option; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
@click.option("--follow", "following", is_flag=True, help="Show the log until the job ends; exit with its code.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(
    script: tuple[str, ...],
    module: bool,
    nodes: int,
    processes: str,
    gpus: str | None,
    memory: str | None,
    time: str | None,
    exclusive: bool,
    job_name: str | None,
    folder: Path | None,
    requeue: bool,
    signal_before: int,
    setup: tuple[str, ...],
    variables: tuple[str, ...],
    extra: tuple[str, ...],
    dry_run: bool,
    following: bool,
    **same_in_sbatch: str | int | None,
) -> int:
    """Submit SCRIPT to SLURM as ranks that train together; prints the job's id."""
    if not script:
        raise LaunchError("no script given: run `samestep submit train.py`, or `samestep submit -m package.module`")
    target, *arguments = script
    check_target(target, module)
    count_processes(processes, gpus=1, cores=1)  # reports a mistake now rather than hours later in the job
    check_resources(gpus, memory)
    named = {"gpus-per-node": gpus, "mem": memory, **same_in_sbatch}
    same = [(name.replace("_", "-"), str(value)) for name, value in named.items() if value is not None]
    flags = [("exclusive", None)] if exclusive else []
    now = datetime.now().astimezone()
    name = folder_name(target, now)
    job = SlurmJob(
        target=target,
        module=module,
        arguments=tuple(arguments),
        name=job_name or (target if module else Path(target).stem),
        nodes=nodes,
        processes=processes,
        folder=(folder or Path("runs") / name).absolute(),
        folder_is_explicit=folder is not None,
        directory=Path.cwd(),
        python=sys.executable,
        seconds=None if time is None else read_time_limit("--time", time),
        signal_before=signal_before,
        requeue=requeue,
        options=(*same, *flags, *map(parse_sbatch_option, extra)),
        variables=tuple(map(parse_variable, variables)),
        setup=setup,
    )
    text = format_sbatch(job)  # before the folder is created, so that a mistake leaves none behind
    if dry_run:
        click.echo(text, nl=False)
        return 0
    check_sbatch()
    output_failure(required=False)
    submitted = _submit(replace(job, folder=make_folder(folder, name).absolute()), now)
    return _follow(submitted) if following else 0


def _submit(job: SlurmJob, now: datetime) -> SubmittedJob:
    """Write the script, submit it, print the job's id, and list the job for `samestep jobs`."""
    path = job.folder / "slurm.sbatch"
    path.write_text(format_sbatch(job))
    submitted = SubmittedJob(
        job_id=submit(path),
        name=job.name,
        submitted_at=now.isoformat(timespec="seconds"),
        nodes=job.nodes,
        folder=str(job.folder),
        sbatch_file=str(path),
        command=(job.target, *job.arguments),
    )
    click.echo(submitted.job_id)
    try:
        add_to_job_list(job_list_path(read_environ()), submitted)
    except LaunchError as error:  # the job is submitted nevertheless
        _echo(f"samestep: {error}")
    _echo(f"samestep: submitted job {submitted.job_id}; log: {log_path(job.folder, submitted.job_id)}")
    return submitted


def _follow(job: SubmittedJob) -> int:
    decode = getincrementaldecoder("utf-8")("replace").decode

    def show(text: bytes) -> None:
        click.echo(decode(text), nl=False)
        if isinstance(output_failure(required=False), BrokenPipeError):
            raise BrokenPipeError  # such as `| head -5`

    try:
        state = follow(job, show, _echo)
    except (KeyboardInterrupt, BrokenPipeError) as end:
        _echo(f"samestep: job {job.job_id} continues; cancel it with `scancel {shlex.quote(job.job_id)}`")
        return 130 if isinstance(end, KeyboardInterrupt) else 141
    reason = f" ({state.reason})" if state.reason else ""
    _echo(f"samestep: job {job.job_id} ended: {state.state}{reason}, exit code {state.exit_code}")
    return state.exit_code
