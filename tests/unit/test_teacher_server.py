"""A teacher's server: its address, authentication, errors, timeouts and the separate process."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from samestep import Run
from samestep.environment.world import World
from samestep.errors import TeacherError
from samestep.teacher.across_ranks import Endpoint, ServedOutputs, connect_to
from samestep.teacher.options import TeacherOptions
from samestep.teacher.server import (
    DISCONNECTED,
    Connection,
    Server,
    ServerAddress,
    ServerProcess,
    connect,
    encode,
    listen,
    local_address_toward,
    server_address,
)
from tests.warm import free_port

LOCAL = ServerAddress("127.0.0.1", "127.0.0.1")


def test_an_unreachable_server_is_named_with_its_address():
    port = free_port()
    with pytest.raises(TeacherError) as caught:
        connect_to(Endpoint(("127.0.0.1", port), b"key", "rank 3"))
    assert f"the teacher's server on rank 3 cannot be reached at 127.0.0.1:{port} (" in str(caught.value)
    assert "set GLOO_SOCKET_IFNAME to the network interface that connects the nodes" in str(caught.value)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_server_on_one_node_uses_the_loopback_address():
    assert server_address(World(size=4, local_size=4, address="somewhere", port=1)) == LOCAL


def test_a_server_on_several_nodes_uses_the_route_to_the_rendezvous(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    away = World(size=2, nodes=2, address="192.0.2.1", port=29500)  # an address that is reserved for documentation
    outward = local_address_toward(away.address, away.port)
    if outward is None:  # this machine has no route
        assert server_address(away) == ServerAddress("", away.address)
    else:
        assert outward not in ("0.0.0.0", "127.0.0.1")
        assert server_address(away) == ServerAddress(outward, outward)
        listen(server_address(away), 1).close()  # it is an address of this machine


def test_a_server_on_the_rendezvous_node_uses_the_rendezvous_name(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # on its own machine a name can resolve to a loopback address, which other machines cannot reach
    found = server_address(World(size=2, nodes=2, address="localhost", port=29500))
    assert found == ServerAddress("", "localhost")
    with listen(found, 1) as listener, socket.create_connection(("localhost", listener.getsockname()[1])):
        pass


def test_a_server_uses_the_interface_of_gloo(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = server_address(World(size=2, nodes=2, address="192.0.2.1", port=29500))
    assert found.bind == found.host
    assert found.host in ("127.0.0.1", "::1")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6, not even for itself")
def test_a_server_can_use_ipv6():
    assert local_address_toward("::1", 1) == "::1"
    server = Server(
        torch.nn.Linear(2, 2), torch.device("cpu"), TeacherOptions(), ServerAddress("::1", "::1"), clients=1
    )
    connection = connect(server.address, server.key)
    connection.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert connection.receive().shape == (1, 2)
    connection.close()
    server.close()


def build_that_exits():
    """A build that ends its process."""
    os._exit(3)


@pytest.mark.slow
def test_a_process_that_ends_before_it_serves_is_reported_with_its_exit_code(tmp_path):
    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    config = (tmp_path / "teacher.safetensors", torch.device("cpu"), TeacherOptions(), LOCAL, 1)
    with pytest.raises(TeacherError, match=r"the teacher's server process \(pid \d+\) ended with exit code 3 before"):
        ServerProcess(build_that_exits, *config)


def test_a_build_that_cannot_be_pickled_is_rejected_before_a_process_starts(tmp_path):
    config = (tmp_path, torch.device("cpu"), TeacherOptions(), LOCAL, 1)
    with pytest.raises(TeacherError, match=r"the server process cannot import build=.*<lambda> \("):
        ServerProcess(lambda: torch.nn.Linear(1, 1), *config)


@pytest.fixture
def server():
    module = torch.nn.Linear(2, 2)
    server = Server(module, torch.device("cpu"), TeacherOptions(), LOCAL, clients=1)
    yield server
    server.close()


def test_a_silent_client_does_not_delay_a_rank(server):
    with socket.create_connection(server.address), socket.create_connection(server.address):
        began = time.monotonic()
        connection = connect(server.address, server.key)
        connection.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
        assert connection.receive().shape == (1, 2)
        assert time.monotonic() - began < 15, "a silent client has 30 s"
        connection.close()


def test_a_client_without_the_key_is_disconnected(server):
    wrong = connect(server.address, b"a guess")
    with pytest.raises(DISCONNECTED):  # noqa: PT012  # either of the two may find the connection closed
        wrong.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
        wrong.receive()
    wrong.close()
    right = connect(server.address, server.key)
    right.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert right.receive().shape == (1, 2)
    right.close()


def test_no_client_is_accepted_after_the_last_rank(server):
    first = connect(server.address, server.key)
    first.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
    first.receive()
    with pytest.raises(DISCONNECTED):
        connect(server.address, server.key)
    first.close()


def test_a_tensor_that_cannot_be_encoded_leaves_the_connection_usable(server):
    connection = connect(server.address, server.key)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        connection.send(encode(((torch.eye(2).to_sparse(),), {}), "the teacher's input"))
    connection.send(encode(((torch.zeros(1, 2),), {}), "the teacher's input"))
    assert connection.receive().shape == (1, 2)
    connection.close()


@pytest.fixture
def weights(tmp_path):
    save_file({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


@pytest.mark.slow
def test_a_server_process_ignores_job_signals_and_stops_on_request(weights):
    config = (weights, torch.device("cpu"), TeacherOptions(), LOCAL, 1)
    serving = ServerProcess(partial(torch.nn.Linear, 1, 1), *config)
    held = os.dup(serving._process.stdin.fileno())  # as a forked data worker does
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(serving.pid, number)
        connection = connect(serving.address, serving.key)
        connection.send(encode(((torch.zeros(1, 1),), {}), "the teacher's input"))
        assert connection.receive().shape == (1, 1)
        connection.close()
        serving.close()
        assert serving.exit_code == 0, "it stopped and was not killed"
    finally:
        os.close(held)
        serving.close()


class Raising(torch.nn.Module):
    """A teacher that raises an error for some inputs."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if x.sum() > 0:
            raise self.error
        return x


@contextlib.contextmanager
def serving(module, seconds=120):
    """A connection to a server of this module, with a timeout."""
    server = Server(module, torch.device("cpu"), TeacherOptions(), LOCAL, clients=1)
    connection = connect(server.address, server.key)
    connection._socket.settimeout(seconds)
    try:
        yield connection
    finally:
        connection.close()
        server.close()


def request(x):
    return encode(((x,), {}), "the teacher's input")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "no such file"), EOFError("a file ended"), ConnectionResetError(), ValueError("no")]
)
def test_an_error_of_the_teacher_reaches_the_client_and_the_next_request_works(error):
    with serving(Raising(error)) as connection:
        for _ in range(2):
            connection.send(request(torch.ones(1)))
            with pytest.raises(TeacherError, match=f"the teacher failed on its server: {type(error).__name__}: "):
                connection.receive()
            connection.send(request(torch.zeros(1)))
            assert connection.receive() == torch.zeros(1)


class Unsendable(torch.nn.Module):
    def forward(self, x):
        return object() if x.sum() > 0 else x


def test_an_output_that_cannot_be_sent_is_reported_and_the_connection_stays_usable():
    with serving(Unsendable()) as connection:
        connection.send(request(torch.ones(1)))
        with pytest.raises(TeacherError, match="the teacher's output is a object, which samestep can neither send"):
            connection.receive()
        connection.send(request(torch.zeros(1)))
        assert connection.receive() == torch.zeros(1)


def test_a_server_that_cannot_read_a_request_disconnects_its_client(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with serving(torch.nn.Identity()) as connection:
        head = b'{"form": '  # truncated JSON
        connection.send([len(head).to_bytes(8, "little") + head])
        with pytest.raises(EOFError):
            connection.receive()
    assert [message.exc_type.__name__ for message in failed] == ["JSONDecodeError"], "the server prints it"


@pytest.fixture
def error_for(tmp_path):
    """The error of a rank for a response."""
    with Run(global_batch=2, folder=tmp_path / "run", start_timeout=1, step_timeout=1) as run:

        def wait_for(response):
            with pytest.raises(TeacherError) as caught:
                ServedOutputs(response, run._lifecycle.context, "rank 3", lambda: "its node is silent").result()
            return str(caught.value)

        yield wait_for


def test_a_server_whose_node_lost_power_is_reported_as_lost(error_for):
    response = Future()
    response.set_exception(OSError(errno.ETIMEDOUT, "Connection timed out"))  # a TimeoutError
    message = error_for(response)
    assert "rank 0 lost the teacher on rank 3 ([Errno 110] Connection timed out): it failed" in message
    assert message.endswith("its node is silent")


def test_a_server_that_exceeds_the_timeout_is_reported_as_slow(error_for):
    assert error_for(Future()).startswith("rank 0 has waited 1 s for the teacher on rank 3: if a forward pass takes")


def test_connections_use_tcp_keepalive():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        Connection(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def build_with_missing_import():
    """A build that can be imported, but whose own import fails."""
    import nowhere_to_be_found  # noqa: F401


@pytest.mark.slow
def test_an_import_error_inside_build_is_raised_unchanged(weights):
    config = (weights, torch.device("cpu"), TeacherOptions(), LOCAL, 1)
    with pytest.raises(TeacherError, match=r"^ModuleNotFoundError: No module named 'nowhere_to_be_found'"):
        ServerProcess(build_with_missing_import, *config)
