"""Run a job on this node: start the ranks, watch them until they end, and report the first failure on the screen.

The way of a failure: `Lifecycle.fail` of the failed rank posts its status for its peers (distributed/rank_status.py)
and writes the exception to the rank's error file. Peers that wait for it raise RankMissing. The agent sees the exit
codes and ends the other ranks (agent.py). The launcher reads the error files and logs, sorts the failures by cause and
prints one report (failure_report.py).
"""

import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from samestep.environment.processes import process_is_gone, seconds_from_boot
from samestep.environment.world import OOM_RETRIES, export, oom_retries
from samestep.errors import OUT_OF_MEMORY, PREEMPTED, STOPPED, TIME_LIMIT_REACHED, LaunchError
from samestep.launch.agent import run_agent
from samestep.launch.failure_report import (
    Failure,
    exit_code_after_hang,
    explains,
    format_hang_report,
    format_report,
    is_crash,
    is_ended_by_agent,
    is_requested_exit,
    read_last_output,
    read_stop_message,
    sort_by_cause,
)
from samestep.launch.hang_monitor import HangMonitor
from samestep.launch.job import Job
from samestep.launch.rank_logs import LauncherEvents, RankFiles, RankLogs
from samestep.launch.rendezvous import can_resolve
from samestep.launch.signal_handler import SignalHandler, StoppedBySignal
from samestep.messages import format_list, hide_secrets

_DISK_BLOCK = 4096  # bytes: with less free space no line can be written


class Launcher:
    """Runs one job. The launcher's own messages go to `echo`."""

    def __init__(self, job: Job, signals: SignalHandler, echo: Callable[[str], None]) -> None:
        self._job, self._signals, self._echo = job, signals, echo
        self._logs = RankLogs(job.folder / "logs", job.show)
        self._events = LauncherEvents(self._logs.folder, socket.gethostname(), echo)
        self._hangs = HangMonitor(job, echo, self._events)

    def run(self) -> int:
        """Run the job to its end; returns 0 or the exit code of the rank that failed first.

        Raises StoppedBySignal if a signal stopped the job. No process of the job is left, and no process
        that a rank started in the background, unless it belongs to another user.
        """
        with closing(self._events), closing(self._hangs):
            rendezvous = self._job.rendezvous
            ranks = {"ranks": self._job.processes, "nodes": [rendezvous.min_nodes, rendezvous.max_nodes]}
            process = {"pid": os.getpid(), "started_from_boot": round(seconds_from_boot(os.getpid()), 2)}
            self._events.record("launch", command=hide_secrets(self._job.command[1:]), **process, **ranks)
            try:
                code = self._run()
            except StoppedBySignal as stop:
                self._events.record("stopped", text=str(stop))
                raise
            self._events.record("end", code=code)
            return code

    def _run(self) -> int:
        failures = self._run_attempts()
        while any(failure.code == OUT_OF_MEMORY for failure in failures) and self._signals.received is None:
            self._halve_micro_batch()
            failures = self._run_attempts()
        if failures:
            return self._report_end(failures)
        if left := self._signals.end_descendants():
            self._report_left_behind(left)
        return 0

    def _report_left_behind(self, left: list[psutil.Process]) -> None:
        survivors = [process for process in left if not process_is_gone(process)]
        if ended := [f"process {process.pid}" for process in left if process not in survivors]:
            shown = format_list(ended, 5)
            self._echo(f"samestep: all ranks have ended, so the launcher has ended what they left running: {shown}")
        if survivors:
            shown = format_list([f"process {process.pid}" for process in survivors], 5)
            self._echo(
                f"samestep: all ranks have ended, but the launcher cannot end what they left running: {shown}, of "
                "another user or waiting for a device: end it with `sudo kill`"
            )

    def _run_attempts(self) -> list[Failure]:
        """Run the ranks, with restarts, until all processes have ended; returns the failures of the last attempt."""
        job, logs, signals = self._job, self._logs, self._signals
        redirect_agent_log(logging.StreamHandler() if job.verbose else logs.open_agent_log(socket.gethostname()))
        signals.exception = SignalException
        try:
            run_agent(job, logs, signals, self._hangs, self._events, self._echo, self._record_restart)
        except (ChildFailedError, SignalException) as error:
            signals.exception = None
            signals.end_descendants()
            if isinstance(error, SignalException):
                raise StoppedBySignal(str(error), error.sigval) from error
            failures = self._describe_all(error.failures)
            codes = [failure.code for failure in failures]
            # After a signal, the signal is the cause of every failure, unless the ranks have saved.
            has_saved = is_requested_exit(codes) and PREEMPTED in codes
            if not has_saved and (cause := signals.received or signals.died_of_warning(codes)) is not None:
                raise StoppedBySignal(f"stopped by {cause.name}", cause) from error
            return failures
        except (RendezvousError, DistError) as error:
            raise LaunchError(explain_rendezvous_error(job, error, had_started=bool(logs.files))) from error
        finally:
            signals.exception = None
            logs.close()
        return []

    def _describe_all(self, failures: Mapping[int, ProcessFailure]) -> list[Failure]:
        first = min(failure.timestamp for failure in failures.values())
        return [self._describe(rank, failure, first) for rank, failure in failures.items()]

    def _record_restart(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Record why the ranks are started again: the console shows only that they are."""
        described = self._describe_all(failures)
        self._record_failure(described, self._format_report(described))

    def _record_failure(self, failures: list[Failure], report: str, cause: str = "") -> None:
        """Record a failure with its cause, in one line: by default that of the rank that has failed first."""
        first = sort_by_cause(failures)[0]
        ended = [{"rank": each.rank, "time": each.time, "how": each.ending} for each in failures]
        cause = cause or f"rank {first.rank}: {first.message}"
        logs = str(self._logs.folder)
        self._events.record("failure", cause=cause, rank=first.rank, report=report, logs=logs, ranks_ended=ended)

    def _report_failure(self, failures: list[Failure], report: str, cause: str = "") -> None:
        self._record_failure(failures, report, cause)
        if self._job.shows_failure:
            self._echo(report)

    def _format_report(self, failures: list[Failure]) -> str:
        several_nodes, ended = (
            self._job.rendezvous.max_nodes > 1,
            self._logs.files.keys() - {each.rank for each in failures},
        )
        return format_report(
            failures, self._job.processes, socket.gethostname(), self._logs.folder, several_nodes, ended
        )

    def _describe(self, rank: int, failure: ProcessFailure, first: float) -> Failure:
        output, is_traceback = read_last_output(self._logs.files[rank], is_crash(failure.exitcode))
        killed = failure.pid in self._signals.killed_pids and failure.exitcode < 0  # else it ended by itself before
        return Failure(
            rank=rank,
            pid=failure.pid,
            code=failure.exitcode,
            time=failure.timestamp,
            ended_by_launcher=killed or is_ended_by_agent(failure.exitcode, failure.timestamp - first),
            ended_after_hang=failure.pid in self._hangs.ended_pids,
            output=output,
            is_traceback=is_traceback,
            already_shown=self._logs.has_shown(rank),
        )

    def _report_end(self, failures: list[Failure]) -> int:
        codes = [failure.code for failure in failures]
        if is_requested_exit(codes):
            code = PREEMPTED if PREEMPTED in codes else STOPPED
            text = format_stop(code, [self._logs.files[failure.rank] for failure in failures])
            self._events.record("stopped", text=text)
            self._echo(text)
            return code
        if self._signals.time_limit_reached:
            text = (
                f"samestep: the time limit of {self._job.time_limit} is over: killed {len(failures)} rank(s) that had "
                "not ended by themselves; the last checkpoint, if there is one, is intact: start the job again to "
                "resume"
            )
            self._events.record("stopped", text=text)
            self._echo(text)
            return TIME_LIMIT_REACHED
        if not self._logs.folder.is_dir():
            self._echo(f"samestep: the log folder {self._logs.folder} was removed while the ranks were running")
        elif shutil.disk_usage(self._logs.folder).free < _DISK_BLOCK:
            self._echo(f"samestep: the disk of {self._logs.folder} is full, so the logs may be incomplete: free space")
        if (hang := self._hangs.explanation) is not None and explains(hang, failures):
            text = format_hang_report(failures, hang, self._job.processes, socket.gethostname(), self._logs.folder)
            self._report_failure(failures, text, hang.summary.splitlines()[0].removeprefix("samestep: "))
            return exit_code_after_hang(failures, hang)
        self._report_failure(failures, self._format_report(failures))
        return sort_by_cause(failures)[0].exit_code

    def _halve_micro_batch(self) -> None:
        """Prepare a run with half the micro-batch; the launchers of other nodes do the same and use the same new id."""
        retries = oom_retries() + 1
        export({OOM_RETRIES: str(retries)})
        self._events.record("out_of_memory")
        self._echo(
            "samestep: out of memory in the first steps: restarting all ranks with half the micro-batch; the global "
            "batch and the training result stay the same"
        )
        rendezvous = self._job.rendezvous
        self._job = replace(self._job, rendezvous=replace(rendezvous, id=f"{rendezvous.id}-half{retries}"))
        self._logs.files.clear()


def format_stop(code: int, files: list[RankFiles]) -> str:
    """The last line of a job whose ranks were stopped by a signal or a time limit, with the message of one of them."""
    messages = filter(None, map(read_stop_message, files))
    message = next(messages, f"the ranks ended with exit code {code}")
    if code == PREEMPTED:
        return f"samestep: preempted: {message}; start the job again to resume"
    return f"samestep: stopped: {message}"


def explain_rendezvous_error(job: Job, error: Exception, had_started: bool) -> str:
    """What went wrong between the launchers of several nodes, and what to check."""
    rendezvous = job.rendezvous
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause).strip().splitlines() or ["timed out"])[0].rstrip(".")
    host = rendezvous.host
    if not can_resolve(host):  # torch only reports a timeout
        reason = f"the host name {host} cannot be resolved"
    fewest, most = rendezvous.min_nodes, rendezvous.max_nodes
    nodes = f"the launchers of {most if fewest == most else f'{fewest} to {most}'} node(s)"
    reason = f"at {rendezvous.endpoint} ({type(error).__name__}: {reason})"
    if had_started:
        return (
            f"{nodes} lost their rendezvous {reason}: the launcher that ended first reports the cause; the logs of the "
            f"ranks on this node are in {job.folder / 'logs'}; start all launchers again to resume"
        )
    return (
        f"{nodes} did not find each other {reason}: check that --rdzv-endpoint and --rdzv-id are the same on every "
        "node and that the port is reachable, or pass --verbose to see the log of torch's agent"
    )


def redirect_agent_log(handler: logging.Handler) -> None:
    """Send the log of torch's agent to `handler` only: on the console it would hide a rank's traceback."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for prefix in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(prefix)
        logger.addHandler(handler)
        logger.propagate = False
        for name in [known for known in logging.root.manager.loggerDict if known.startswith(prefix)]:
            logging.getLogger(name).setLevel(logging.INFO)
