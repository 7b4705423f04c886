"""The ranks of this node under torchrun's elastic agent, with samestep's rules about which ranks to restart.

torch's `elastic_launch` creates the agent itself. samestep subclasses the agent instead, so that ranks that saved, were
stopped or ran out of memory are not restarted as they were.
"""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from samestep.environment.processes import running, send_signal
from samestep.environment.world import export
from samestep.errors import OUT_OF_MEMORY, LaunchError
from samestep.launch.failure_report import is_requested_exit
from samestep.launch.job import Job
from samestep.launch.rank_logs import RankLogs
from samestep.launch.signal_handler import SignalHandler

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousHandler

_MONITOR_SECONDS = 0.1
_JOIN_TIMEOUT_SECONDS = 900  # torchrun's default for the rendezvous
_NEW_NODE_SECONDS = 2.0  # how long a launcher may take to learn of a waiting node: it refreshes its state every second
_EXIT_BARRIER_SECONDS = 30  # that the launchers of other nodes get to see their own ranks end


def run_agent(job: Job, logs: RankLogs, signals: SignalHandler, echo: Callable[[str], None]) -> None:
    """Start the ranks of this node and monitor them until they end; raises ChildFailedError if one fails."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    export({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"})  # SignalHandler handles the others
    spec = _worker_spec(job)
    agent = _create_agent(job, spec, _logs_specs(logs, signals, echo), signals)
    try:
        result = cast("RunResult | None", agent.run())
    except SignalException:
        raise  # without shutdown, which would close the rendezvous for the nodes that continue
    except BaseException:
        spec.rdzv_handler.shutdown()
        raise
    spec.rdzv_handler.shutdown()
    if result is not None and result.is_failed():
        raise ChildFailedError(name=spec.get_entrypoint_name(), failures=result.failures)


def _worker_spec(job: Job) -> "WorkerSpec":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    rendezvous = job.rendezvous
    static = rendezvous.backend == "static"
    address, port = parse_rendezvous_endpoint(rendezvous.endpoint, default_port=-1) if static else (None, None)
    parameters = RendezvousParameters(
        backend=rendezvous.backend,
        endpoint=rendezvous.endpoint,
        run_id=rendezvous.id,
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        local_addr=rendezvous.local_address,
        **{"timeout": _JOIN_TIMEOUT_SECONDS, **rendezvous.settings},
    )
    try:
        handler = get_rendezvous_handler(parameters)
    except ValueError as error:
        raise LaunchError(
            f"torch rejects --rdzv-conf: {str(error).rstrip('.')}; pass timeouts in whole seconds, as in "
            "--rdzv-conf join_timeout=600"
        ) from error
    return WorkerSpec(
        role="rank",
        local_world_size=job.processes,
        entrypoint=sys.executable,
        # torch substitutes ${local_rank} as string.Template does; each $ is doubled to keep the arguments unchanged.
        args=tuple(argument.replace("$", "$$") for argument in job.command),
        rdzv_handler=handler,
        max_restarts=job.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
        master_addr=address,
        master_port=port,
        local_addr=rendezvous.local_address,
    )


def _logs_specs(logs: RankLogs, signals: SignalHandler, echo: Callable[[str], None]) -> "LogsSpecs":
    """The object from which torch gets the log files before it starts the ranks of each attempt."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogsSpecs(LogsSpecs):
        """RankLogs in torch's interface."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """Open the files of an attempt."""
            signals.raise_if_received()
            if logs.files:
                signals.end_descendants()
                reason = "because a rank failed or the nodes changed"
                echo(f"samestep: restarting all ranks, {reason}; logs so far: {logs.folder}")
            paths = logs.open(envs)
            for local_rank, path in paths.error_files.items():
                envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
            return paths

        @property
        def root_log_dir(self) -> str:
            """The folder of all attempts."""
            return str(logs.folder)

    return RankLogsSpecs()


def _create_agent(job: Job, spec: "WorkerSpec", logs_specs: "LogsSpecs", signals: SignalHandler) -> "LocalElasticAgent":
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    elastic = job.rendezvous.min_nodes < job.rendezvous.max_nodes
    parent: Any = LocalElasticAgent  # the decorators on torch's methods hide their types

    class Agent(parent):
        """Torch's agent. It reports the ranks' pids to the SignalHandler and restarts only ranks that failed."""

        def _start_workers(self, worker_group: "WorkerGroup") -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            signals.rank_pids = frozenset(started.values())
            return started

        def _stop_workers(self, worker_group: "WorkerGroup", *rest: Any, **named: Any) -> None:
            save_and_stop_ranks(signals)
            super()._stop_workers(worker_group, *rest, **named)
            signals.rank_pids = frozenset()

        def _monitor_workers(self, worker_group: "WorkerGroup") -> "RunResult":
            with _kill_others_after_failure(signals):
                result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if elastic and _ended_for_new_node(signals, codes, worker_group.spec.rdzv_handler):
                return RunResult(state=WorkerState.HEALTHY)  # the agent then sees the waiting node and restarts
            stopped = signals.received or signals.time_limit_reached or signals.died_of_warning(codes)
            if codes and (stopped or OUT_OF_MEMORY in codes or is_requested_exit(codes)):
                self._remaining_restarts = 0
                if is_requested_exit(codes):  # on all nodes; other launchers may still use the store of this one
                    self._exit_barrier_timeout = _EXIT_BARRIER_SECONDS
                    self._exit_barrier()
            return result

        def _exit_barrier(self) -> None:
            signals.rank_pids = frozenset()
            if job.rendezvous.max_nodes == 1:
                signals.exception = None  # there is nothing to wait for, and the result is final
            super()._exit_barrier()

    known = inspect.signature(LocalElasticAgent.__init__).parameters
    since_2_12 = {"shutdown_timeout": signals.shutdown_timeout} if "shutdown_timeout" in known else {}
    return Agent(spec=spec, logs_specs=logs_specs, start_method="spawn", **since_2_12)


def save_and_stop_ranks(signals: SignalHandler) -> None:
    """Send SIGTERM to the running ranks, for example because a node joins, and wait up to the grace period.

    torch by itself kills them after 30 seconds, or 5 in some versions, which may be in the middle of a long save.
    """
    send_signal(running(signals.rank_pids), signal.SIGTERM)
    deadline = time.monotonic() + signals.grace_period
    while running(signals.rank_pids) and time.monotonic() < deadline:
        time.sleep(_MONITOR_SECONDS)
    send_signal(running(signals.rank_pids), signal.SIGKILL)


@contextmanager
def _kill_others_after_failure(signals: SignalHandler) -> Generator[None]:
    """If a rank has failed, kill the others after the shutdown timeout.

    torch sends them SIGTERM and waits for 30 seconds, in which a rank that takes SIGTERM as a request to save waits for
    the failed rank.
    """
    if signals.received is not None or not any(_has_failed(pid) for pid in signals.rank_pids):
        yield
        return
    timer = threading.Timer(signals.shutdown_timeout, signals.kill_remaining_ranks)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _has_failed(pid: int) -> bool:
    """Whether a rank has ended with a failure; its exit status is left for the agent to collect."""
    if sys.platform != "linux":
        return False
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    if ended is None:
        return False
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return code != 0 and not is_requested_exit([code])


def _ended_for_new_node(signals: SignalHandler, codes: list[int], rendezvous: "RendezvousHandler") -> bool:
    """Whether the ranks saved and ended because another node's launcher stopped them to let a new node join."""
    if not is_requested_exit(codes) or signals.received or signals.time_limit_reached or signals.warning:
        return False
    deadline = time.monotonic() + _NEW_NODE_SECONDS
    while not rendezvous.num_nodes_waiting() and time.monotonic() < deadline:
        time.sleep(_MONITOR_SECONDS)
    return rendezvous.num_nodes_waiting() > 0
