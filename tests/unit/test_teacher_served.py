"""A server that cannot be reached or never comes to serve, and outputs that cannot be compressed or joined."""

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep.errors import TeacherError
from samestep.nn import TopK
from samestep.teacher.cached import _joined
from samestep.teacher.ground import Wish
from samestep.teacher.outputs import Outputs, compressed
from samestep.teacher.served import _call, _Post
from samestep.teacher.served_process import Order, ServingProcess
from samestep.teacher.served_server import Server
from samestep.teacher.served_wire import GONE, call_in
from tests.warm import free_port


def test_top_k_needs_logits():
    with pytest.raises(TeacherError, match="top_k=2 needs logits, and the teacher gives a tuple: let its module give"):
        compressed((torch.zeros(2, 5),), 2, 1.0)


def test_logits_by_name_are_compressed_and_the_rest_stays():
    for kind in (dict, Outputs):
        found = compressed(kind(logits=torch.arange(10.0).reshape(2, 5), hidden=torch.ones(2)), 2, 1.0)
        assert type(found) is kind
        assert isinstance(found["logits"], TopK)
        assert compressed(found, 2, 1.0)["logits"] is found["logits"], "what a server did is not done again"
        assert torch.equal(found["hidden"], torch.ones(2))


def test_outputs_tell_what_they_have():
    with pytest.raises(AttributeError, match=r"the teacher's outputs have no 'scores', only \['logits'\]"):
        Outputs(logits=1).scores  # noqa: B018


def test_a_server_that_cannot_be_reached_is_told_with_its_address():
    port = free_port()
    with pytest.raises(TeacherError) as caught:
        _call(_Post(("127.0.0.1", port), b"key", "rank 3"))
    assert f"the teacher's server of rank 3 cannot be reached at 127.0.0.1:{port} (" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME names the network interface that nodes reach each other by" in str(caught.value)


def test_rows_of_different_shapes_cannot_be_one_batch():
    rows = [(["tensor", None], [torch.zeros(size)]) for size in (2, 3)]
    with pytest.raises(TeacherError, match="keeps outputs of different shapes for the samples of one micro-batch"):
        _joined(rows, Path("cache"))


def dies():
    """Stands for a build that takes its process with it."""
    os._exit(3)


@pytest.mark.slow
def test_a_process_that_ends_before_it_serves_is_told_with_its_exit_code(tmp_path):
    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    order = Order(tmp_path / "teacher.safetensors", torch.device("cpu"), Wish(), "127.0.0.1", 1)
    with pytest.raises(TeacherError, match=r"the process of the teacher \(pid \d+\) ended with exit code 3 before it"):
        ServingProcess(dies, order)


def test_a_build_that_cannot_travel_is_refused_before_a_process_is_started(tmp_path):
    order = Order(tmp_path, torch.device("cpu"), Wish(), "127.0.0.1", 1)
    with pytest.raises(TeacherError, match=r"a process of its own cannot import build=.*<lambda> \("):
        ServingProcess(lambda: torch.nn.Linear(1, 1), order)


@pytest.fixture
def server():
    module = torch.nn.Linear(2, 2)
    made = Server(module, torch.device("cpu"), Wish(), "127.0.0.1", callers=1)
    yield made
    made.close()


def test_a_stranger_who_says_nothing_keeps_no_rank_waiting(server):
    with socket.create_connection(server.address), socket.create_connection(server.address):
        began = time.monotonic()
        wire = call_in(server.address, server.key)
        wire.send(((torch.zeros(1, 2),), {}), "the teacher's input")
        assert wire.receive().shape == (1, 2)
        assert time.monotonic() - began < 15, "a silent caller is given 30 s"
        wire.close()


def test_who_does_not_know_the_key_is_turned_away_and_another_served(server):
    wrong = call_in(server.address, b"a guess")
    with pytest.raises(GONE):  # noqa: PT012  # which of the two meets the closed line is a matter of time
        wrong.send(((torch.zeros(1, 2),), {}), "the teacher's input")
        wrong.receive()
    wrong.close()
    right = call_in(server.address, server.key)
    right.send(((torch.zeros(1, 2),), {}), "the teacher's input")
    assert right.receive().shape == (1, 2)
    right.close()


def test_nobody_is_let_in_once_all_have_called(server):
    first = call_in(server.address, server.key)
    first.send(((torch.zeros(1, 2),), {}), "the teacher's input")
    first.receive()
    with pytest.raises(GONE):
        call_in(server.address, server.key)
    first.close()


def test_what_cannot_become_bytes_leaves_the_line_in_order(server):
    wire = call_in(server.address, server.key)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        wire.send(((torch.eye(2).to_sparse(),), {}), "the teacher's input")
    wire.send(((torch.zeros(1, 2),), {}), "the teacher's input")
    assert wire.receive().shape == (1, 2)
    wire.close()


@pytest.fixture
def weights(tmp_path):
    save_file({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    return tmp_path / "teacher.safetensors"


@pytest.mark.slow
def test_a_process_leaves_signals_of_the_job_to_its_rank_and_ends_when_it_is_told(weights):
    order = Order(weights, torch.device("cpu"), Wish(), "127.0.0.1", 1)
    serving = ServingProcess(partial(torch.nn.Linear, 1, 1), order)
    held = os.dup(serving._process.stdin.fileno())  # as a data worker does that was forked off
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(serving.pid, number)
        wire = call_in(serving.address, serving.key)
        wire.send(((torch.zeros(1, 1),), {}), "the teacher's input")
        assert wire.receive().shape == (1, 1)
        wire.close()
        serving.close()
        assert serving.exit_code == 0, "it ended by itself and was not killed"
    finally:
        os.close(held)
        serving.close()
