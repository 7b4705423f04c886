"""A server: where it is reached, by whom, and what is said where it is not; rows that cannot be joined."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep import Run
from samestep.environment.world import World
from samestep.errors import TeacherError
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.output_cache import _joined
from samestep.teacher.served import Asked, Order, ServingProcess, _call, _Post
from samestep.teacher.server import GONE, Address, Server, Wire, address_of, address_towards, call_in, open_door, packed
from tests.warm import free_port

HERE = Address("127.0.0.1", "127.0.0.1")


def test_a_server_that_cannot_be_reached_is_told_with_its_address():
    port = free_port()
    with pytest.raises(TeacherError) as caught:
        _call(_Post(("127.0.0.1", port), b"key", "rank 3"))
    assert f"the teacher's server of rank 3 cannot be reached at 127.0.0.1:{port} (" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME names the network interface that nodes reach each other by" in str(caught.value)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_on_one_node_a_server_is_reached_by_the_loopback_address():
    assert address_of(World(size=4, local_size=4, address="somewhere", port=1)) == HERE


def test_on_several_nodes_a_server_is_reached_on_the_way_to_where_the_ranks_met(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    away = World(size=2, nodes=2, address="192.0.2.1", port=29500)  # an address for documentation: nobody is there
    outward = address_towards(away.address, away.port)
    if outward is None:  # no way leads anywhere from this machine
        assert address_of(away) == Address("", away.address)
    else:
        assert outward not in ("0.0.0.0", "127.0.0.1")
        assert address_of(away) == Address(outward, outward)
        open_door(address_of(away), 1).close()  # it is this machine's own


def test_where_the_ranks_met_a_server_is_reached_by_the_name_that_all_know(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # a name may lead to a loopback address on its own machine, at which no other would find it
    found = address_of(World(size=2, nodes=2, address="localhost", port=29500))
    assert found == Address("", "localhost")
    with open_door(found, 1) as door, socket.create_connection(("localhost", door.getsockname()[1])):
        pass


def test_the_interface_that_gloo_is_told_is_the_servers_too(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = address_of(World(size=2, nodes=2, address="192.0.2.1", port=29500))
    assert found.listen == found.call
    assert found.call in ("127.0.0.1", "::1")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6, not even for itself")
def test_a_server_may_listen_at_an_address_of_ipv6():
    assert address_towards("::1", 1) == "::1"
    made = Server(torch.nn.Linear(2, 2), torch.device("cpu"), TeacherOptions(), Address("::1", "::1"), callers=1)
    wire = call_in(made.address, made.key)
    wire.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert wire.receive().shape == (1, 2)
    wire.close()
    made.close()


def test_rows_of_different_shapes_cannot_be_one_batch():
    rows = [(["tensor", None], [torch.zeros(size)]) for size in (2, 3)]
    with pytest.raises(TeacherError, match="keeps outputs of different shapes for the samples of one micro-batch"):
        _joined(rows, Path("cache"), torch.device("cpu"))


def dies():
    """Stands for a build that takes its process with it."""
    os._exit(3)


@pytest.mark.slow
def test_a_process_that_ends_before_it_serves_is_told_with_its_exit_code(tmp_path):
    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    order = Order(tmp_path / "teacher.safetensors", torch.device("cpu"), TeacherOptions(), HERE, 1)
    with pytest.raises(TeacherError, match=r"the process of the teacher \(pid \d+\) ended with exit code 3 before it"):
        ServingProcess(dies, order)


def test_a_build_that_cannot_travel_is_refused_before_a_process_is_started(tmp_path):
    order = Order(tmp_path, torch.device("cpu"), TeacherOptions(), HERE, 1)
    with pytest.raises(TeacherError, match=r"a process of its own cannot import build=.*<lambda> \("):
        ServingProcess(lambda: torch.nn.Linear(1, 1), order)


@pytest.fixture
def server():
    module = torch.nn.Linear(2, 2)
    made = Server(module, torch.device("cpu"), TeacherOptions(), HERE, callers=1)
    yield made
    made.close()


def test_a_stranger_who_says_nothing_keeps_no_rank_waiting(server):
    with socket.create_connection(server.address), socket.create_connection(server.address):
        began = time.monotonic()
        wire = call_in(server.address, server.key)
        wire.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
        assert wire.receive().shape == (1, 2)
        assert time.monotonic() - began < 15, "a silent caller is given 30 s"
        wire.close()


def test_who_does_not_know_the_key_is_turned_away_and_another_served(server):
    wrong = call_in(server.address, b"a guess")
    with pytest.raises(GONE):  # noqa: PT012  # which of the two meets the closed line is a matter of time
        wrong.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
        wrong.receive()
    wrong.close()
    right = call_in(server.address, server.key)
    right.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert right.receive().shape == (1, 2)
    right.close()


def test_nobody_is_let_in_once_all_have_called(server):
    first = call_in(server.address, server.key)
    first.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
    first.receive()
    with pytest.raises(GONE):
        call_in(server.address, server.key)
    first.close()


def test_what_cannot_become_bytes_leaves_the_line_in_order(server):
    wire = call_in(server.address, server.key)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        wire.send(packed(((torch.eye(2).to_sparse(),), {}), "the teacher's input"))
    wire.send(packed(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert wire.receive().shape == (1, 2)
    wire.close()


@pytest.fixture
def weights(tmp_path):
    save_file({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


@pytest.mark.slow
def test_a_process_leaves_signals_of_the_job_to_its_rank_and_ends_when_it_is_told(weights):
    order = Order(weights, torch.device("cpu"), TeacherOptions(), HERE, 1)
    serving = ServingProcess(partial(torch.nn.Linear, 1, 1), order)
    held = os.dup(serving._process.stdin.fileno())  # as a data worker does that was forked off
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(serving.pid, number)
        wire = call_in(serving.address, serving.key)
        wire.send(packed(((torch.zeros(1, 1),), {}), "the teacher's input"))
        assert wire.receive().shape == (1, 1)
        wire.close()
        serving.close()
        assert serving.exit_code == 0, "it ended by itself and was not killed"
    finally:
        os.close(held)
        serving.close()


class Raising(torch.nn.Module):
    """A teacher that fails, as one does that reads files of its own."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if x.sum() > 0:
            raise self.error
        return x


@contextlib.contextmanager
def serving(module, seconds=20):
    """A wire to a server of this module, on which nobody waits for longer."""
    made = Server(module, torch.device("cpu"), TeacherOptions(), HERE, callers=1)
    wire = call_in(made.address, made.key)
    wire._socket.settimeout(seconds)
    try:
        yield wire
    finally:
        wire.close()
        made.close()


def question(x):
    return packed(((x,), {}), "the teacher's input")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "no such file"), EOFError("a file ended"), ConnectionResetError(), ValueError("no")]
)
def test_whatever_a_teacher_raises_reaches_who_asked_and_the_next_question_is_answered(error):
    with serving(Raising(error)) as wire:
        for _ in range(2):
            wire.send(question(torch.ones(1)))
            with pytest.raises(TeacherError, match=f"the teacher failed on its server: {type(error).__name__}: "):
                wire.receive()
            wire.send(question(torch.zeros(1)))
            assert wire.receive() == torch.zeros(1)


class Unsendable(torch.nn.Module):
    def forward(self, x):
        return object() if x.sum() > 0 else x


def test_an_output_that_cannot_be_sent_is_told_and_leaves_the_line_in_order():
    with serving(Unsendable()) as wire:
        wire.send(question(torch.ones(1)))
        with pytest.raises(TeacherError, match="the teacher's output is a object, which can be neither sent nor kept"):
            wire.receive()
        wire.send(question(torch.zeros(1)))
        assert wire.receive() == torch.zeros(1)


def test_a_server_that_cannot_read_a_question_hangs_up_instead_of_keeping_its_caller_waiting(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with serving(torch.nn.Identity()) as wire:
        head = b'{"form": '  # of which the end is missing
        wire.send([len(head).to_bytes(8, "little") + head])
        with pytest.raises(EOFError):
            wire.receive()
    assert [told.exc_type.__name__ for told in failed] == ["JSONDecodeError"], "it is told where the server runs"


@pytest.fixture
def asked(tmp_path):
    """What a rank gets for an answer that comes as told."""
    with Run(global_batch=2, folder=tmp_path / "run", start_timeout=1, step_timeout=1) as run:

        def ask(answer):
            ground = Ground(run._comm, torch.device("cpu"), run.folder, run.print, run.once)
            with pytest.raises(TeacherError) as caught:
                Asked(answer, ground, lambda: "its node is silent", "rank 3").result()
            return str(caught.value)

        yield ask


def test_a_server_whose_node_lost_its_power_is_gone_and_not_slow(asked):
    answer = Future()
    answer.set_exception(OSError(errno.ETIMEDOUT, "Connection timed out"))  # a TimeoutError
    told = asked(answer)
    assert "rank 0 asked the teacher of rank 3, which is gone ([Errno 110] Connection timed out): it died" in told
    assert told.endswith("its node is silent")


def test_a_server_that_takes_longer_than_a_step_may_is_slow(asked):
    assert asked(Future()).startswith("rank 0 waits for the teacher of rank 3 since 1 s: if a forward pass takes")


def test_a_silent_line_is_asked_whether_anybody_is_there():
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as connection,
    ):
        Wire(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def needs_what_is_not_there():
    """A build whose own imports fail: it was found all the same."""
    import nowhere_to_be_found  # noqa: F401


@pytest.mark.slow
def test_a_build_that_fails_to_import_something_is_not_said_to_be_unknown_itself(weights):
    order = Order(weights, torch.device("cpu"), TeacherOptions(), HERE, 1)
    with pytest.raises(TeacherError, match=r"^ModuleNotFoundError: No module named 'nowhere_to_be_found'"):
        ServingProcess(needs_what_is_not_there, order)
