"""torch's elastic agent in our manner: ranks that have saved or were stopped are not started anew."""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from samestep.environment.world import export
from samestep.errors import LaunchError
from samestep.launch.failure_report import OUT_OF_MEMORY, is_told_to_end
from samestep.launch.processes import living, signal_all
from samestep.launch.signal_handler import Stop

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

_NEWS_SECONDS = 2.0  # after which a launcher has heard of a node that waits: what it knows of others is a second old
_NEWS_PAUSE = 0.1
_LOOK_PAUSE = 0.1
_OTHER_NODES_SECONDS = 30  # that the launchers of other nodes get to see their own ranks end


def run_agent(config: "LaunchConfig", arguments: list[str], stop: Stop) -> None:
    """Run ranks to their end, as torch's elastic_launch does; ChildFailedError where one of them did not end well.

    elastic_launch makes its agent itself, and only an agent of our own knows why it should not restart its ranks.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    signals = getattr(config, "signals_to_handle", None)
    export({} if signals is None else {"TORCHELASTIC_SIGNALS_TO_HANDLE": signals})
    spec = _spec(config, arguments)
    agent = _agent(config, spec, stop)
    shut_down = True
    try:
        result = cast("RunResult | None", agent.run())
    except SignalException:
        shut_down = False  # that would close the meeting for nodes which go on
        raise
    finally:
        if shut_down:
            spec.rdzv_handler.shutdown()
    if result is not None and result.is_failed():
        raise ChildFailedError(name=spec.get_entrypoint_name(), failures=result.failures)


def _spec(config: "LaunchConfig", arguments: list[str]) -> "WorkerSpec":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    static = config.rdzv_backend == "static"
    address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1) if static else (None, None)
    meeting = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    try:
        handler = get_rendezvous_handler(meeting)
    except ValueError as error:
        raise LaunchError(
            f"torch does not take --rdzv-conf: {str(error).rstrip('.')}; type whole seconds for a timeout, as in "
            "--rdzv-conf join_timeout=600"
        ) from error
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
    )


def _agent(config: "LaunchConfig", spec: "WorkerSpec", stop: Stop) -> "LocalElasticAgent":
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    elastic = config.min_nodes < config.max_nodes
    parent: Any = LocalElasticAgent  # the decorators that torch puts around its methods hide their types

    class Agent(parent):
        """Tells the launcher which ranks live, and asks it before it starts them anew."""

        def _start_workers(self, worker_group: "WorkerGroup") -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            stop.ranks = frozenset(started.values())
            return started

        def _stop_workers(self, worker_group: "WorkerGroup", *rest: Any, **named: Any) -> None:
            let_save(stop)
            super()._stop_workers(worker_group, *rest, **named)
            stop.ranks = frozenset()

        def _monitor_workers(self, worker_group: "WorkerGroup") -> "RunResult":
            with _impatience(stop):
                result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if elastic and _has_made_room(stop, codes, worker_group.spec.rdzv_handler):
                return RunResult(state=WorkerState.HEALTHY)  # so that the agent looks who waits, and lets them in
            if codes and _is_final(stop, codes):
                self._remaining_restarts = 0
                if is_told_to_end(codes):  # on all nodes, whose launchers may still ask this one's store
                    self._exit_barrier_timeout = _OTHER_NODES_SECONDS
                    self._exit_barrier()
            return result

        def _exit_barrier(self) -> None:
            stop.ranks = frozenset()
            if config.max_nodes == 1:
                stop.raise_as(None)  # nobody is waited for, and how the ranks ended stands
            super()._exit_barrier()

    known = inspect.signature(LocalElasticAgent.__init__).parameters
    newer = {"shutdown_timeout": getattr(config, "shutdown_timeout", None)}  # since torch 2.12
    return Agent(
        spec=spec,
        logs_specs=config.logs_specs,  # pyright: ignore[reportArgumentType]  # ours is never None
        start_method=config.start_method,
        **{name: value for name, value in newer.items() if name in known and value is not None},
    )


def let_save(stop: Stop) -> None:
    """Ask ranks that live to end, as those of a world that a node joins, and give them the grace that a signal gives.

    torch kills them after half a minute, or five seconds by some of its versions, in the midst of a long save.
    """
    signal_all(living(stop.ranks), signal.SIGTERM)
    until = time.monotonic() + stop.grace
    while living(stop.ranks) and time.monotonic() < until:
        time.sleep(_LOOK_PAUSE)
    signal_all(living(stop.ranks), signal.SIGKILL)


@contextmanager
def _impatience(stop: Stop) -> Generator[None]:
    """Kill the other ranks soon where one has failed.

    torch asks them to end and waits for half a minute; a rank that takes it for a signal to save waits in vain.
    """
    if stop.received is not None or not any(_has_failed(pid) for pid in stop.ranks):
        yield
        return
    timer = threading.Timer(stop.patience, stop.end_ranks)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_final(stop: Stop, codes: list[int]) -> bool:
    """Whether ranks that ended so are not to be started anew as they were: saved, stopped, or too large."""
    warned = stop.warned is not None and -stop.warned in codes
    return stop.received is not None or stop.time_is_over or warned or OUT_OF_MEMORY in codes or is_told_to_end(codes)


def _has_made_room(stop: Stop, codes: list[int], meeting: "RendezvousHandler") -> bool:
    """Whether ranks saved and ended because another node's launcher, which saw a new node first, asked its own to."""
    if not is_told_to_end(codes) or stop.received is not None or stop.time_is_over or stop.warned is not None:
        return False
    until = time.monotonic() + _NEWS_SECONDS
    while not meeting.num_nodes_waiting() and time.monotonic() < until:
        time.sleep(_NEWS_PAUSE)
    return meeting.num_nodes_waiting() > 0


def _has_failed(pid: int) -> bool:
    """Whether a rank has ended, and not because it was told to; its exit is left for the agent to collect."""
    if sys.platform != "linux":
        return False
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    if ended is None:
        return False
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return code != 0 and not is_told_to_end([code])
