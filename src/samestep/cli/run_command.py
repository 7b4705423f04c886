"""`samestep run`: start a script as ranks on this machine, or on several nodes together."""

import io
import os
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TypedDict, Unpack
from uuid import uuid4

import click

from samestep.environment.bf16_probe import probe_bf16
from samestep.environment.world import export, read_environ
from samestep.errors import LaunchError
from samestep.launch.failure_report import TIME_LIMIT_REACHED
from samestep.launch.job import (
    Job,
    Show,
    can_serve,
    check_module,
    check_port,
    check_script,
    choose_variables,
    count_cores,
    count_gpus,
    count_processes,
    find_place,
    folder_name,
    is_known,
    make_folder,
    read_time_limit,
)
from samestep.launch.launcher import launch
from samestep.launch.processes import name_launcher
from samestep.launch.rendezvous import (
    Rendezvous,
    RendezvousOptions,
    choose_rendezvous,
    host_here,
    invitation,
    serve_where_named,
)
from samestep.launch.signal_handler import Stop, Stopped, keep_exit_code

_PATIENCE = 5  # seconds that ranks get to end by themselves after Ctrl-C
_GRACE = 120  # seconds that they get to save and end after SIGTERM


class Typed(TypedDict):
    """What was typed, by the names that the options below give it."""

    module: bool
    processes: str
    nodes: str
    standalone: bool
    backend: str | None
    endpoint: str | None
    id: str | None
    settings: str
    node_rank: int | None
    address: str | None
    port: int | None
    local_address: str | None
    max_restarts: int
    folder: Path | None
    folder_is_default: bool
    time_limit: str | None
    grace: int | None
    show: Show
    verbose: bool
    script: tuple[str, ...]


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


@click.command(
    context_settings={
        # Everything from the script on is the script's; torchrun's underscores are as good as dashes.
        "allow_interspersed_args": False,
        "token_normalize_func": _with_dashes,
        "help_option_names": ["-h", "--help"],
    },
    epilog="Everything after the script goes to it untouched. Examples: samestep run train.py --lr 0.1; "
    "samestep run --nproc-per-node 2 -m lab.train; samestep run --nnodes 2 --rdzv-endpoint node1:29400 train.py; "
    "samestep run --nnodes 1:4 --max-restarts 3 train.py",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    "--nproc-per-node", "processes", default="auto", show_default=True, metavar="auto|gpu|cpu|N",
    help="Ranks on this node; auto: one for each GPU, or one for two cores.",
)  # fmt: skip
@click.option("--nnodes", "nodes", default="1", show_default=True, metavar="N|MIN:MAX", help="Nodes of the job.")
@click.option("--standalone", is_flag=True, help="This machine alone, on a free port; so it is without --nnodes too.")
@click.option(
    "--rdzv-backend", "backend", metavar="NAME", help="How nodes find each other: c10d, static, etcd, etcd-v2."
)
@click.option("--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="Where the nodes meet; the same on every node.")
@click.option("--rdzv-id", "id", metavar="NAME", help="Name of the job; the same on every node.")
@click.option("--rdzv-conf", "settings", default="", metavar="KEY=VALUE,...", help="Further settings of the backend.")
@click.option("--node-rank", type=int, metavar="N", help="This node's number, with --master-addr.")
@click.option("--master-addr", "address", metavar="HOST", help="The first node's host.")
@click.option("--master-port", "port", type=int, metavar="PORT", help="The first node's port.")
@click.option("--local-addr", "local_address", metavar="HOST", help="How other nodes reach this one.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="How often all ranks are started anew after a failure.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path), help="The run's folder; default runs/SCRIPT-DATE-TIME.")
@click.option("--folder-is-default", is_flag=True, hidden=True)  # by `samestep submit`, which made up the folder's name
@click.option("--time-limit", metavar="TIME",
              help="Save and end before this much time is over, as in 3h55m or 4:00:00; exit code 75.")  # fmt: skip
@click.option("--grace", type=click.IntRange(min=0), metavar="SECONDS",
              help="What ranks get after SIGTERM to save and end; default 120.")  # fmt: skip
@click.option("--show-ranks", "show", type=click.Choice(["first", "all"]), default="first", show_default=True,
              help="Whose output the console shows; every rank's is kept in the folder.")  # fmt: skip
@click.option("--verbose", is_flag=True, help="Let torch's agent speak too.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**typed: Unpack[Typed]) -> int:
    """Start SCRIPT as ranks that train together; the exit code is the first failing rank's."""
    if not typed["script"]:
        raise LaunchError("no script was named: type `samestep run train.py`, or `samestep run -m package.module`")
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank's line is shown when it comes, also through a pipe
    limit = None if typed["time_limit"] is None else read_time_limit("--time-limit", typed["time_limit"])
    began = time.time()
    job, cores, gpus = _decide(typed)
    with Stop(_patience(_PATIENCE), _patience(_GRACE) if typed["grace"] is None else typed["grace"]) as stop:
        stop.if_deaf = partial(_tell_stopped, stop, job)
        try:
            if limit is not None:
                stop.limit(max(0.0, began + limit - time.time()))
                export({"SAMESTEP_DEADLINE": f"{began + limit:.3f}"})
            variables = choose_variables(job, read_environ(), cores, gpus, probe_bf16())
            export({**variables.values, **name_launcher()})
            _say(f"samestep: logs in {job.folder / 'logs'}; the ranks get {variables.reason}")
            return launch(job, stop, _say)
        except Stopped as stopped:
            return _tell_stopped(stop, job, stopped.sigval)
        finally:
            keep_exit_code()


def _decide(typed: Typed) -> tuple[Job, int, int]:
    """The job, and the cores and GPUs it was decided for; mistakes are told before torch is loaded, where possible."""
    target, *arguments = typed["script"]
    (check_module if typed["module"] else check_script)(target)
    cores = count_cores()
    count_processes(typed["processes"], gpus=1, cores=cores)  # a mistyped number is told before torch is loaded
    rendezvous = _meet(_asked(typed))
    gpus = count_gpus(quiet=not typed["verbose"])
    job = Job(
        target=target,
        module=typed["module"],
        arguments=tuple(arguments),
        processes=count_processes(typed["processes"], gpus, cores),
        rendezvous=rendezvous,
        max_restarts=typed["max_restarts"],
        folder=make_folder(typed["folder"], folder_name(target, datetime.now().astimezone())).absolute(),
        folder_is_explicit=typed["folder"] is not None and not typed["folder_is_default"],
        show=typed["show"],
        verbose=typed["verbose"],
        time_limit=typed["time_limit"] or "",
    )
    return job, cores, gpus


def _meet(asked: RendezvousOptions) -> Rendezvous:
    """Where the launchers meet; what other nodes type, where this one hosts the meeting unasked, is said at once."""
    fresh_id = uuid4().hex
    placed = host_here(asked, fresh_id, lambda: find_place(asked.local_address))
    if asked.local_address is not None and not is_known(asked.local_address):
        raise LaunchError(
            f"--local-addr {asked.local_address} leads nowhere from here: type an address of this machine, under which "
            "other nodes reach it"
        )
    rendezvous = serve_where_named(choose_rendezvous(placed, fresh_id), can_serve)
    if rendezvous.hosted_port is not None:
        check_port(rendezvous.hosted_port)
    if placed != asked:
        _say(f"samestep: the nodes meet on this one; to join, type on another: {invitation(placed)}")
    return rendezvous


def _asked(typed: Typed) -> RendezvousOptions:
    return RendezvousOptions(
        nodes=typed["nodes"],
        standalone=typed["standalone"],
        backend=typed["backend"],
        endpoint=typed["endpoint"],
        id=typed["id"],
        settings=typed["settings"],
        node_rank=typed["node_rank"],
        address=typed["address"],
        port=typed["port"],
        local_address=typed["local_address"],
    )


def _tell_stopped(stop: Stop, job: Job, number: Signals) -> int:
    """Say what has stopped the launcher; gives the exit code."""
    if stop.time_is_over:  # which stops a launcher without ranks by a signal of its own
        _say(f"samestep: the time limit of {job.time_limit} is over, and no rank was at work yet")
        return TIME_LIMIT_REACHED
    _say(f"samestep: stopped by {number.name}; every rank has ended")
    return 128 + number


def _open_what_is_closed() -> None:
    """Let a stream that was closed, as by `>&-` or some services, lead nowhere; files would take its number else."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _patience(seconds: int) -> int:
    """The user may set it as for torchrun."""
    told = read_environ().get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return int(told) if told.isdecimal() else seconds


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
