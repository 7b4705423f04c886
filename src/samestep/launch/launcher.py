"""A job run by torch's elastic agent, from the first rank's start to the last process's end."""

import logging
import shutil
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from samestep.environment.world import MICRO_BATCH_HALVINGS, export, micro_batch_halvings
from samestep.errors import LaunchError
from samestep.launch.agent import run_agent
from samestep.launch.failure_report import (
    OUT_OF_MEMORY,
    PREEMPTED,
    STOPPED,
    TIME_LIMIT_REACHED,
    Failure,
    by_cause,
    is_agents_doing,
    is_told_to_end,
    last_words,
    recorded_message,
    tell,
)
from samestep.launch.job import Job, is_known
from samestep.launch.rank_logs import RankFiles, RankLogs
from samestep.launch.signal_handler import Stop, Stopped

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

Say = Callable[[str], None]

_LEAST_BYTES = 4096  # a block: with less no line can be written
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


def launch(job: Job, stop: Stop, say: Say) -> int:
    """Run the job to its end; the exit code is 0 or the first failing rank's. A signal raises Stopped, all ranks ended.

    The launcher's own words go through `say`. Nothing that a failed or stopped job started is left behind; after
    success, what a rank meant to outlive it may live on.
    """
    logs = RankLogs(job.folder / "logs", job.show)
    failures = _run_agent(job, logs, stop, say)
    while any(failure.code == OUT_OF_MEMORY for failure in failures) and stop.received is None:
        job = _halve(job, say)
        logs.files.clear()
        failures = _run_agent(job, logs, stop, say)
    codes = [failure.code for failure in failures]
    if not failures:
        return 0
    if is_told_to_end(codes):
        code = PREEMPTED if PREEMPTED in codes else STOPPED
        say(_tell_end(code, [logs.files[failure.rank] for failure in failures]))
        return code
    if stop.time_is_over:
        say(
            f"samestep: the time limit of {job.time_limit} is over, and {len(failures)} rank(s) had not ended by "
            "themselves: they were killed; what the last checkpoint holds, if there is one, is safe: start again to go "
            "on"
        )
        return TIME_LIMIT_REACHED
    _tell_failures(job, failures, logs, say)
    return by_cause(failures)[0].exit_code


def _tell_failures(job: Job, failures: list[Failure], logs: RankLogs, say: Say) -> None:
    if shutil.disk_usage(logs.folder).free < _LEAST_BYTES:
        say(f"samestep: the disk of {logs.folder} is full, so what ranks printed last may be lost: make room on it")
    say(tell(failures, job.processes, socket.gethostname(), str(logs.folder), job.rendezvous.nodes_max > 1))


def _halve(job: Job, say: Say) -> Job:
    """The job once more with half the micro-batch; launchers of other nodes do the same and meet by its new name."""
    times = micro_batch_halvings() + 1
    export({MICRO_BATCH_HALVINGS: str(times)})
    say(
        "samestep: out of memory in the first steps, so all ranks start anew with half the micro-batch; the global "
        "batch stays, and so does what is learnt"
    )
    return replace(job, rendezvous=replace(job.rendezvous, id=f"{job.rendezvous.id}-half{times}"))


def _run_agent(job: Job, logs: RankLogs, stop: Stop, say: Say) -> list[Failure]:
    """Failures of the last attempt, with every process ended; none after success."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    _listen_to_agent(logging.StreamHandler() if job.verbose else logs.open_agents(socket.gethostname()))
    config = _config(job, _specs(logs, stop, say), stop.patience)
    # torch fills in ${local_rank} as string.Template does; doubling each $ brings the arguments through untouched.
    arguments = [argument.replace("$", "$$") for argument in job.command]
    stop.raise_as(SignalException)
    try:
        run_agent(config, arguments, stop)
    except ChildFailedError as error:
        stop.raise_as(None)
        stop.end_leftovers()
        first = min(failure.timestamp for failure in error.failures.values())
        failures = [_failure(rank, failure, first, logs, stop) for rank, failure in error.failures.items()]
        _raise_if_stopped(stop, [failure.code for failure in failures])
        return failures
    except SignalException as error:
        stop.raise_as(None)
        stop.end_leftovers()
        raise Stopped(str(error), error.sigval) from error
    except (RendezvousError, DistError) as error:
        raise LaunchError(_explain(job, error, had_met=bool(logs.files))) from error
    finally:
        stop.raise_as(None)
        logs.close()
    return []


def _config(job: Job, logs_specs: "LogsSpecs", patience: int) -> "LaunchConfig":
    from torch.distributed.launcher.api import LaunchConfig

    known = {field.name for field in fields(LaunchConfig)}
    newer: dict[str, Any] = {
        "shutdown_timeout": patience,  # since torch 2.12
        "signals_to_handle": "SIGQUIT",  # the others are held by Stop, which also knows a second Ctrl-C
    }
    meeting = job.rendezvous
    return LaunchConfig(
        min_nodes=meeting.nodes_min,
        max_nodes=meeting.nodes_max,
        nproc_per_node=job.processes,
        run_id=meeting.id,
        role="rank",
        rdzv_backend=meeting.backend,
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs=dict(meeting.settings),
        max_restarts=job.max_restarts,
        local_addr=meeting.local_address,
        logs_specs=logs_specs,
        **{name: value for name, value in newer.items() if name in known},
    )


def _specs(logs: RankLogs, stop: Stop, say: Say) -> "LogsSpecs":
    """What torch asks where the output of each attempt's ranks should go; asked once an attempt, before it starts."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Specs(LogsSpecs):
        """Our files, in torch's form."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """Open the files of an attempt."""
            stop.check()
            if logs.files:
                stop.end_leftovers()
                say(
                    f"samestep: a rank failed or the nodes changed, so all ranks start anew; logs so far: {logs.folder}"
                )
            streams = logs.open(envs)
            for local_rank, path in streams.error_files.items():
                envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
            return LogsDest(streams.stdouts, streams.stderrs, {}, {}, streams.error_files)

        @property
        def root_log_dir(self) -> str:
            """Where all logs of the run lie."""
            return str(logs.folder)

    return Specs()


def _raise_if_stopped(stop: Stop, codes: list[int]) -> None:
    """Whatever ranks died of after a signal, it was the signal; but for those that have saved."""
    if is_told_to_end(codes) and PREEMPTED in codes:
        return
    died_of = stop.warned if stop.warned is not None and -stop.warned in codes else None
    if (cause := stop.received or died_of) is not None:
        raise Stopped(f"stopped by {cause.name}", cause)


def _tell_end(code: int, files: list[RankFiles]) -> str:
    said = next((text for each in files if (text := recorded_message(each))), None)
    if code == PREEMPTED:
        return f"samestep: preempted: {said or f'the ranks ended with exit code {code}'}, start again to go on"
    return f"samestep: stopped: {said or f'the ranks ended with exit code {code}'}"


def _failure(rank: int, failure: "ProcessFailure", first: float, logs: RankLogs, stop: Stop) -> Failure:
    said, traceback = last_words(logs.files[rank], crashed=failure.exitcode < 0)
    return Failure(
        rank=rank,
        pid=failure.pid,
        code=failure.exitcode,
        when=failure.timestamp,
        ended=(failure.pid in stop.ended and failure.exitcode < 0)  # else it went by itself meanwhile
        or is_agents_doing(failure.exitcode, failure.timestamp - first),
        said=said,
        traceback=traceback,
        shown=logs.has_shown(rank),
    )


def _explain(job: Job, error: Exception, had_met: bool) -> str:
    meeting = job.rendezvous
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause).strip().splitlines() or ["time is over"])[0].rstrip(".")
    if not is_known(host := meeting.endpoint.rpartition(":")[0].strip("[]")):  # torch tells of time only
        reason = f"the name {host} leads nowhere from here"
    nodes = (
        meeting.nodes_max if meeting.nodes_min == meeting.nodes_max else f"{meeting.nodes_min} to {meeting.nodes_max}"
    )
    if had_met:
        return (
            f"the launchers of {nodes} node(s) have lost each other at {meeting.endpoint} ({type(error).__name__}: "
            f"{reason}): the one that ended first tells why; what the ranks here printed is in {job.folder / 'logs'}; "
            "start all again to go on"
        )
    return (
        f"the launchers of {nodes} node(s) did not meet at {meeting.endpoint} "
        f"({type(error).__name__}: {reason}): check that --rdzv-endpoint and --rdzv-id are the same on every node and "
        "that its port can be reached, or type --verbose to hear torch's agent"
    )


def _listen_to_agent(handler: logging.Handler) -> None:
    """Hand what the agent says to `handler` alone: on the console it would bury a rank's own traceback."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for prefix in _LOGGERS:
        logger = logging.getLogger(prefix)
        logger.addHandler(handler)
        logger.propagate = False
        for name in [known for known in logging.root.manager.loggerDict if known.startswith(prefix)]:
            logging.getLogger(name).setLevel(logging.INFO)
