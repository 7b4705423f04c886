"""`samestep run`: start a script as ranks on this machine, or on several nodes together."""

import io
import re
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import click

from samestep.cli.main import NumberRange, accept_underscores, output_failure
from samestep.disk import describe_os_error
from samestep.environment.hardware import probe_bf16, read_hardware
from samestep.environment.processes import allow_open_files, end_with_parent, files_of_launcher, launcher_variable
from samestep.environment.world import MAX_RANKS, PRECISION, PROFILE, export, read_environ, read_steps
from samestep.errors import TIME_LIMIT_REACHED, LaunchError
from samestep.launch.configuration import (
    CONFIG_FILE,
    KnownConfig,
    config_variable,
    hide_secret_values,
    merge_arguments,
    read_options_file,
    recorded_variables,
    without_given,
    write_launch,
)
from samestep.launch.job import (
    Job,
    OnHang,
    ShowRanks,
    check_target,
    choose_variables,
    count_gpus,
    count_processes,
    folder_name,
    make_folder,
    read_time_limit,
)
from samestep.launch.rendezvous import RendezvousOptions, find_rendezvous
from samestep.launch.signal_handler import SignalHandler, StoppedBySignal, keep_exit_code
from samestep.messages import hide_secrets, read_integer, shorten

_echo = partial(click.echo, err=True)
_SHUTDOWN_TIMEOUT = 5  # seconds that ranks get to end after Ctrl-C
_GRACE_PERIOD = 120  # seconds that they get to save and end after SIGTERM
_LONGEST_GRACE = 10**7  # seconds, about four months
_CLICK_IMPORT = re.compile(rb"^\s*(?:import|from)\s+(?:click|typer)\b", re.MULTILINE)
_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@click.command(
    context_settings={
        # Everything after the script belongs to the script.
        "allow_interspersed_args": False,
        "token_normalize_func": accept_underscores,
    },
    epilog="Everything after the script is passed to it unchanged. Examples: samestep run train.py --lr 0.1; "
    "samestep run --nproc-per-node 2 -m lab.train; samestep run --nnodes 2 --rdzv-endpoint node1:29400 train.py; "
    "samestep run --nnodes 1:4 --max-restarts 3 train.py",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    "--nproc-per-node", "processes", default="auto", show_default=True, metavar="auto|gpu|cpu|N",
    help="Number of ranks on this node; auto: one per GPU, or one per two cores without GPUs.",
)  # fmt: skip
@click.option("--nnodes", "nodes", default="1", show_default=True, metavar="N|MIN:MAX", help="Number of nodes.")
@click.option(
    "--standalone", is_flag=True, help="Use this machine only, on a free port (the default without --nnodes)."
)
@click.option("--rdzv-backend", "backend", metavar="NAME", help="Rendezvous backend: c10d, static, etcd, etcd-v2.")
@click.option(
    "--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="Endpoint of the rendezvous; the same on every node."
)
@click.option("--rdzv-id", "id", metavar="NAME", help="Name of the job; the same on every node.")
@click.option("--rdzv-conf", "settings", default="", metavar="KEY=VALUE,...", help="Further settings of the backend.")
@click.option(
    "--node-rank", type=NumberRange(0, MAX_RANKS - 1), metavar="N", help="Number of this node, with --master-addr."
)
@click.option("--master-addr", "address", metavar="HOST", help="Host of node 0.")
@click.option("--master-port", "port", type=NumberRange(1, 65535), metavar="PORT", help="Port of node 0.")
@click.option("--local-addr", "local_address", metavar="HOST", help="Address at which other nodes reach this one.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
              help="Options of SCRIPT as a .yaml, .toml or .json file; arguments after SCRIPT win.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16", "fp64"]),
              help="Replaces the precision of the script; fp64 compares runs without rounding.")  # fmt: skip
@click.option(
    "--profile", metavar="FIRST:END", help="Write a trace of these steps of rank 0, as in 10:13 for the steps 10 to 12."
)
@click.option("--max-restarts", type=NumberRange(0, MAX_RANKS), default=0, show_default=True, metavar="N",
              help="How often to restart all ranks after a failure.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of the run; default runs/SCRIPT-DATE-TIME.")
@click.option("--folder-is-default", is_flag=True, hidden=True)  # set by `samestep submit` if it chose the folder
@click.option("--time-limit", metavar="TIME",
              help="Save and end before this time is over, as in 3h55m or 4:00:00; exit code 75.")  # fmt: skip
@click.option("--grace", type=NumberRange(0, _LONGEST_GRACE), metavar="SECONDS",
              help="Time that ranks get to save and end after SIGTERM; default 120.")  # fmt: skip
@click.option("--on-hang", type=click.Choice(["report", "stop", "restart"]),
              help="If ranks wait for a rank that does not arrive: only report it, stop the run as soon as the cause "
              "is certain, or restart all ranks; by default, report it and stop at the timeout of torch.")  # fmt: skip
@click.option("--show-ranks", "show", type=click.Choice(["first", "all"]), default="first", show_default=True,
              help="Whose output the console shows; the logs in the folder contain all ranks.")  # fmt: skip
@click.option("--verbose", is_flag=True, help="Show the log of torch's agent.")
@click.option("--parent", type=int, hidden=True)  # the process that called samestep.launch, and raises the failure
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(
    script: tuple[str, ...],
    module: bool,
    processes: str,
    config: Path | KnownConfig | None,
    precision: str | None,
    profile: str | None,
    max_restarts: int,
    folder: Path | None,
    folder_is_default: bool,
    time_limit: str | None,
    grace: int | None,
    on_hang: OnHang | None,
    show: ShowRanks,
    verbose: bool,
    parent: int | None,
    **rendezvous_options: Any,
) -> int:
    """Start SCRIPT as ranks that train together; the exit code is that of the rank that fails first."""
    if not script:
        raise LaunchError("no script given: run `samestep run train.py`, or `samestep run -m package.module`")
    if on_hang == "restart" and max_restarts == 0:
        raise LaunchError(
            "--on-hang restart needs restarts, and --max-restarts is 0: add --max-restarts 3, or pass --on-hang stop"
        )
    _prepare_process(parent)
    deadline = None if time_limit is None else time.time() + read_time_limit("--time-limit", time_limit)
    environ = recorded_variables(read_environ())
    _export_run_options(precision, profile)
    check_target(script[0], module)
    target, arguments, known = _read_config(script, module, config)
    cores = read_hardware().cores.usable
    count_processes(processes, gpus=1, cores=cores)  # reports a mistake before torch is imported, which takes seconds
    rendezvous = find_rendezvous(RendezvousOptions(**rendezvous_options), _echo)
    gpus = count_gpus(quiet=not verbose)
    job = Job(
        target=target,
        module=module,
        arguments=arguments,
        processes=count_processes(processes, gpus, cores),
        rendezvous=rendezvous,
        max_restarts=max_restarts,
        folder=make_folder(folder, folder_name(target, datetime.now().astimezone())).absolute(),
        folder_is_explicit=folder is not None and not folder_is_default,
        show=show,
        verbose=verbose,
        time_limit=time_limit or "",
        on_hang=on_hang or "default",
        shows_failure=parent is None,
    )
    _record_launch(job, known, environ, {"precision": precision, "grace": grace, "on_hang": on_hang})
    if problem := allow_open_files(files_of_launcher(job.processes)):
        raise LaunchError(f"{problem}; or start fewer ranks")
    try:
        with SignalHandler(_timeout(_SHUTDOWN_TIMEOUT), _timeout(_GRACE_PERIOD) if grace is None else grace) as signals:
            return _run(job, signals, cores, gpus, deadline)
    except BlockingIOError as error:  # of a fork
        raise LaunchError(
            f"this user may not start more processes ({error.strerror}): start fewer ranks, or raise `ulimit -u`"
        ) from error


def _prepare_process(parent: int | None) -> None:
    if parent is not None:
        end_with_parent(parent)
    output_failure(required=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # show each line of a rank when it arrives, also in a pipe


def _export_run_options(precision: str | None, profile: str | None) -> None:
    """Set the variables by which the ranks replace an option of their run."""
    if profile is not None and read_steps(profile) is None:
        raise LaunchError(
            f"--profile must be FIRST:END with the first step below the end, as in 10:13, got {shorten(profile)}"
        )
    export({name: value for name, value in ((PRECISION, precision), (PROFILE, profile)) if value is not None})


def _read_config(
    script: tuple[str, ...], module: bool, config: Path | KnownConfig | None
) -> tuple[str, tuple[str, ...], KnownConfig]:
    """The script, its arguments with those of the file, and the values of the file, which the ranks get to know."""
    target, *arguments = script
    known = config if isinstance(config, KnownConfig) else KnownConfig({}, None)
    if isinstance(config, Path):
        file = read_options_file(config)
        repeat_lists = not module and bool(_CLICK_IMPORT.search(Path(target).read_bytes()))
        added = merge_arguments(without_given(file.options, arguments), [], repeat_lists)
        _echo(f"samestep: {config} adds {shlex.join(hide_secrets(added)) or 'nothing'}")
        arguments = merge_arguments(file.options, arguments, repeat_lists)
        known = KnownConfig(hide_secret_values(file.values()), str(config))
    export(config_variable(known.values))
    return target, tuple(arguments), known


def _record_launch(job: Job, known: KnownConfig, variables: Mapping[str, str], options: Mapping[str, object]) -> None:
    """Write config.json, which `samestep rerun` repeats."""
    nodes = job.rendezvous.min_nodes, job.rendezvous.max_nodes
    folder = {"folder": str(job.folder), "folder_is_explicit": job.folder_is_explicit}
    of_job = {"time_limit": job.time_limit, "max_restarts": job.max_restarts, "show": job.show}
    launch = {
        "command": ["samestep", *hide_secrets(sys.argv[1:])],
        "folder": str(Path.cwd()),
        "script": job.target,
        "module": job.module,
        "arguments": hide_secrets(job.arguments),
        "ranks": job.processes,
        "nodes": nodes[0] if nodes[0] == nodes[1] else list(nodes),
        "launcher": {**folder, **of_job, **options},
        "config_file": known.file,
        "config": known.values,
        "rerun_of": known.rerun_of,
        "environment": variables,
    }
    try:
        write_launch(job.folder, launch)
    except OSError as error:
        _echo(f"samestep: {job.folder / CONFIG_FILE} cannot be written: {describe_os_error(error)}")


def _run(job: Job, signals: SignalHandler, cores: int, gpus: int, deadline: float | None) -> int:
    signals.on_blocked_main_thread = partial(_report_stop, job, signals)
    try:
        if deadline is not None:
            signals.set_time_limit(max(0.0, deadline - time.time()))
            export({"SAMESTEP_DEADLINE": f"{deadline:.3f}"})
        variables, explanation = choose_variables(job, read_environ(), cores, gpus, probe_bf16())
        export({**variables, **launcher_variable()})
        _echo(f"samestep: logs in {job.folder / 'logs'}; set for the ranks: {explanation}")
        from samestep.launch.launcher import Launcher  # imports torch, which takes seconds

        return Launcher(job, signals, _echo).run()
    except StoppedBySignal as stopped:
        return _report_stop(job, signals, stopped.sigval)
    finally:
        keep_exit_code()


def _report_stop(job: Job, signals: SignalHandler, number: Signals) -> int:
    """Print what stopped the launcher; returns its exit code."""
    if signals.time_limit_reached:  # a launcher without ranks stops itself by a signal
        _echo(f"samestep: the time limit of {job.time_limit} is over, before any rank had started")
        return TIME_LIMIT_REACHED
    _echo(f"samestep: stopped by {number.name}; all ranks have ended")
    return 128 + number


def _timeout(default: int) -> int:
    """Seconds; the user may set them with the same variable as for torchrun."""
    text = read_environ().get(_TIMEOUT_VARIABLE, "")
    seconds = read_integer(text) if text else default
    if seconds is None or seconds > _LONGEST_GRACE:
        raise LaunchError(
            f"{_TIMEOUT_VARIABLE}={shorten(text)} is not a number of seconds: set it to a whole number up to "
            f"{_LONGEST_GRACE}, or run `unset {_TIMEOUT_VARIABLE}`"
        )
    return seconds
