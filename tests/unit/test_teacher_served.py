"""A server that cannot be reached or never comes to serve, and outputs that cannot be compressed or joined."""

import os
from pathlib import Path

import pytest
import torch

from samestep.errors import TeacherError
from samestep.nn import TopK
from samestep.teacher.cached import _joined
from samestep.teacher.ground import Wish
from samestep.teacher.outputs import Outputs, compressed
from samestep.teacher.served import _call, _Post
from samestep.teacher.served_process import Order, ServingProcess
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
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    order = Order(tmp_path / "teacher.safetensors", torch.device("cpu"), Wish(), "127.0.0.1", 1)
    with pytest.raises(TeacherError, match=r"the process of the teacher \(pid \d+\) ended with exit code 3 before it"):
        ServingProcess(dies, order)


def test_a_build_that_cannot_travel_is_refused_before_a_process_is_started(tmp_path):
    order = Order(tmp_path, torch.device("cpu"), Wish(), "127.0.0.1", 1)
    with pytest.raises(TeacherError, match=r"a process of its own cannot import build=.*<lambda> \("):
        ServingProcess(lambda: torch.nn.Linear(1, 1), order)
