"""The ranks of this node under torchrun's elastic agent, with samestep's rules about which ranks to restart.

torch's `elastic_launch` creates the agent itself. samestep subclasses the agent instead, so that ranks that saved, were
stopped or ran out of memory are not restarted as they were.
"""

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from samestep.environment.network import connect_unless_silent
from samestep.environment.processes import exit_code, running, send_signal
from samestep.environment.world import export
from samestep.errors import OUT_OF_MEMORY, LaunchError
from samestep.launch.failure_report import is_requested_exit
from samestep.launch.hang_monitor import HangMonitor, Ranks
from samestep.launch.job import Job
from samestep.launch.rank_logs import LauncherEvents, RankFiles, RankLogs
from samestep.launch.rendezvous import Rendezvous
from samestep.launch.signal_handler import SignalHandler

_MONITOR_SECONDS = 0.1
_JOIN_TIMEOUT_SECONDS = 900  # torchrun's default for the rendezvous
_NEW_NODE_SECONDS = 2.0  # how long a launcher may take to learn of a waiting node: it refreshes its state every second
_EXIT_BARRIER_SECONDS = 30  # that the launchers of other nodes get to see their own ranks end


def run_agent(
    job: Job,
    logs: RankLogs,
    signals: SignalHandler,
    hangs: HangMonitor,
    events: LauncherEvents,
    echo: Callable[[str], None],
    restarting: Callable[[Mapping[int, ProcessFailure]], None],
) -> None:
    """Start the ranks of this node and monitor them until they end; raises ChildFailedError if one fails.

    `restarting` is called with the failures after which the ranks start again.
    """
    export({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"})  # SignalHandler handles the others
    spec = _worker_spec(job)
    known = inspect.signature(LocalElasticAgent.__init__).parameters
    since_2_12 = {"shutdown_timeout": signals.shutdown_timeout} if "shutdown_timeout" in known else {}
    logs_specs = _LogsSpecs(logs, signals, hangs, echo)
    agent = _Agent(job, signals, hangs, logs_specs, events, restarting, spec=spec, **since_2_12)
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


def _worker_spec(job: Job) -> WorkerSpec:
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
    handler = _connect(rendezvous, parameters)
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


def _connect(rendezvous: Rendezvous, parameters: RendezvousParameters) -> RendezvousHandler:
    """Torch's rendezvous; raises if another service answers at its endpoint, for which torch would wait."""

    def connect() -> RendezvousHandler:
        if rendezvous.backend == "static" and not rendezvous.is_host:  # its handler connects later, while ranks start
            timeout = timedelta(seconds=_JOIN_TIMEOUT_SECONDS)
            TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return get_rendezvous_handler(parameters)

    try:
        handler = connect_unless_silent(connect, rendezvous.host, rendezvous.port)
    except (ValueError, OverflowError) as error:
        raise LaunchError(
            f"torch rejects --rdzv-conf: {str(error).rstrip('.')}; pass timeouts in whole seconds, as in "
            "--rdzv-conf join_timeout=600"
        ) from error
    except ImportError as error:  # of the client of etcd
        raise LaunchError(
            f"--rdzv-backend {rendezvous.backend} needs a package that is not installed ({error}): install it, or use "
            "c10d"
        ) from error
    if handler is None and rendezvous.backend in ("etcd", "etcd-v2"):
        raise LaunchError(
            f"the process that listens at {rendezvous.endpoint} does not answer like etcd: pass the address and the "
            "client port of the etcd server to --rdzv-endpoint, or use --rdzv-backend c10d"
        )
    if handler is None:
        raise LaunchError(
            f"the process that listens at {rendezvous.endpoint} is not a launcher, since it does not answer like a "
            "store of torch: choose a port that no other service uses, the same on every node"
        )
    return handler


class _LogsSpecs(LogsSpecs):
    """RankLogs in torch's interface: torch gets the log files here before it starts the ranks of each attempt."""

    def __init__(self, logs: RankLogs, signals: SignalHandler, hangs: HangMonitor, echo: Callable[[str], None]) -> None:
        super().__init__()
        self._logs, self._signals, self._hangs, self._echo = logs, signals, hangs, echo
        self.run_id: str | None = None  # replaces that of the rendezvous in the variables of the ranks

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the files of an attempt."""
        self._signals.raise_if_received()
        if self._logs.files:
            self._signals.end_descendants()
            reason = "because a rank failed or the nodes changed"
            self._echo(f"samestep: restarting all ranks, {reason}; logs so far: {self._logs.folder}")
        paths = self._logs.open(envs)
        variables = self._hangs.variables()
        for local_rank, path in paths.error_files.items():
            envs[local_rank].update(variables)
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
            if self.run_id is not None:
                envs[local_rank]["TORCHELASTIC_RUN_ID"] = self.run_id
        return paths

    @property
    def files(self) -> dict[int, RankFiles]:
        """The files of the current attempt by global rank."""
        return self._logs.files

    @property
    def root_log_dir(self) -> str:
        """The folder of all attempts."""
        return str(self._logs.folder)


_TorchAgent: Any = LocalElasticAgent  # the decorators on torch's methods hide their types


class _Agent(_TorchAgent):
    """Torch's agent. It reports the ranks' pids to the SignalHandler and restarts only ranks that failed."""

    def __init__(
        self,
        job: Job,
        signals: SignalHandler,
        hangs: HangMonitor,
        logs: _LogsSpecs,
        events: LauncherEvents,
        restarting: Callable[[Mapping[int, ProcessFailure]], None],
        **options: Any,
    ) -> None:
        super().__init__(start_method="spawn", logs_specs=logs, **options)
        self._node_job, self._signal_handler, self._rank_logs = job, signals, logs  # names that torch does not use
        self._hangs, self._events, self._restarting = hangs, events, restarting

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._node_job.rendezvous.is_unnamed and worker_group.store is not None:
            self._rank_logs.run_id = agree_on_run_id(worker_group.store)
        started = super()._start_workers(worker_group)
        self._signal_handler.rank_pids = frozenset(started.values())
        assert worker_group.store is not None, "torch has joined the rendezvous before"
        ranks = Ranks(
            attempt=worker_group.spec.max_restarts - self._remaining_restarts,
            pids={worker.global_rank: started[worker.local_rank] for worker in worker_group.workers},
            logs=self._rank_logs.files,
            node=cast("int", worker_group.group_rank),
            nodes=cast("int", worker_group.group_world_size),
            world_size=worker_group.workers[0].world_size,
            store=worker_group.store,
        )
        self._events.record("attempt", attempt=ranks.attempt, world_size=ranks.world_size, pids=ranks.pids)
        self._hangs.start(ranks)
        return started

    def _stop_workers(self, worker_group: WorkerGroup, *rest: Any, **named: Any) -> None:
        self._hangs.stop()
        save_and_stop_ranks(self._signal_handler)
        super()._stop_workers(worker_group, *rest, **named)
        self._signal_handler.rank_pids = frozenset()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        signals = self._signal_handler
        has_failed = any(map(_has_failed, signals.rank_pids))
        if has_failed:
            self._hangs.rank_failed()
        with _kill_others_after_failure(signals, has_failed):
            result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            self._hangs.stop()
        codes = [failure.exitcode for failure in result.failures.values()]
        rendezvous = self._node_job.rendezvous
        elastic = rendezvous.min_nodes < rendezvous.max_nodes
        if elastic and _ended_for_new_node(signals, codes, worker_group.spec.rdzv_handler):
            return RunResult(state=WorkerState.HEALTHY)  # the agent then sees the waiting node and restarts
        stopped = signals.received or signals.time_limit_reached or signals.died_of_warning(codes)
        if codes and (stopped or OUT_OF_MEMORY in codes or is_requested_exit(codes) or self._hangs.forbids_restart):
            self._remaining_restarts = 0
            if is_requested_exit(codes):  # on all nodes; other launchers may still use the store of this one
                self._exit_barrier_timeout = _EXIT_BARRIER_SECONDS
                self._exit_barrier()
        if result.failures and self._remaining_restarts > 0:
            self._restarting(result.failures)
        return result

    def _exit_barrier(self) -> None:
        self._signal_handler.rank_pids = frozenset()
        if self._node_job.rendezvous.max_nodes == 1:
            self._signal_handler.exception = None  # there is nothing to wait for, and the result is final
        super()._exit_barrier()


def agree_on_run_id(store: Store) -> str:
    """A run id for the ranks of this launch, the same on all nodes and after restarts; "none" with a store of etcd.

    Without --rdzv-id all launches have the same id, and a second one would count as a restart of the first.
    """
    while isinstance(store, PrefixStore):  # the c10d rendezvous has another prefix after each restart
        store = store.underlying_store
    # etcd keeps its keys when the launchers have ended
    return store.compare_set("samestep/run id", "", uuid4().hex).decode() if isinstance(store, TCPStore) else "none"


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
def _kill_others_after_failure(signals: SignalHandler, has_failed: bool) -> Generator[None]:
    """If a rank has failed, kill the others after the shutdown timeout.

    torch sends them SIGTERM and waits for 30 seconds, in which a rank that takes SIGTERM as a request to save waits for
    the failed rank.
    """
    timer = threading.Timer(signals.shutdown_timeout, signals.kill_remaining_ranks)
    if signals.received is None and has_failed:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _has_failed(pid: int) -> bool:
    code = exit_code(pid)
    return bool(code) and not is_requested_exit([code])


def _ended_for_new_node(signals: SignalHandler, codes: list[int], rendezvous: RendezvousHandler) -> bool:
    """Whether the ranks saved and ended because another node's launcher stopped them to let a new node join."""
    if not is_requested_exit(codes) or signals.received or signals.time_limit_reached or signals.warning:
        return False
    deadline = time.monotonic() + _NEW_NODE_SECONDS
    while not rendezvous.num_nodes_waiting() and time.monotonic() < deadline:
        time.sleep(_MONITOR_SECONDS)
    return rendezvous.num_nodes_waiting() > 0
