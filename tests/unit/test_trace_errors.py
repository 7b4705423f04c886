"""Build functions that a plan cannot use: each error says what is, what should be and what to type."""

import pytest
import torch
from torch import nn

from samestep.errors import PlanError
from samestep.measure.trace import trace_model

A, C = 8, 3


@pytest.fixture(autouse=True)
def _caches_elsewhere(tmp_path_factory, monkeypatch):
    # torch sets this for good when it first thinks of compiling
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def net():
    return nn.Linear(A, C)


def batch():
    return torch.zeros(4, A)


def failing():
    raise FileNotFoundError("weights.pt is not there")


def on_cuda():
    return net().to("cuda"), batch()


def asking_for_cuda():
    raise AssertionError("Torch not compiled with CUDA enabled")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            failing,
            r"failing\(\) failed, so there is no model to look at \(FileNotFoundError: weights.pt is not there\): call "
            "it by itself to see where",
        ),
        (
            asking_for_cuda,
            r"asking_for_cuda\(\) asks for CUDA \(AssertionError: Torch not compiled with CUDA enabled\): build the "
            "model and its batch without a device; a plan needs none, and Run moves them to its own",
        ),
        (net, r"net\(\) returned a Linear: return a model and an example batch, def build\(\): return Net\(\), \("),
        (lambda: (net(),), r"returned a tuple of 1: return a model and an example batch"),
        (lambda: (batch(), net()), r"returned a tensor of shape \(4, 8\) as its model: return an nn.Module first"),
        (
            lambda: (net().requires_grad_(False), batch()),
            "Linear has no parameter that trains: a plan is made for training",
        ),
        (
            lambda: (net(), None),
            "returned None as its example batch: return tensors with samples along their first dimension",
        ),
        (lambda: (net(), torch.zeros(0, A)), r"returned a tensor of shape \(0, 8\) as its example batch"),
        (lambda: (net(), object()), "returned a batch that cannot be used: batch is of class object"),
        (
            lambda: (net(), batch(), 0.5),
            "returned a float as its third value: leave it out, or return a function of model and batch that gives the",
        ),
        (
            lambda: (net(), torch.zeros(4, A + 1)),
            r"Linear cannot be called with the example batch \(RuntimeError: .*\): return the batch as the model takes "
            "it, or a third value, lambda model, batch: loss, that calls it",
        ),
        (
            lambda: (net(), batch(), lambda model, batch: 3),
            r"loss gave a int: it must give a tensor that gradients come from, for example lambda model, batch: "
            r"cross_entropy\(model\(batch\[0\]\), batch\[1\]\)",
        ),
    ],
)
def test_a_build_that_cannot_be_used_says_why(build, text):
    with pytest.raises(PlanError, match=text):
        trace_model(build, precision="fp32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the model is built there, and refused for that")
def test_a_build_on_cuda_without_cuda_is_told_to_leave_the_device_out():
    with pytest.raises(
        PlanError, match=r"on_cuda\(\) asks for CUDA \(.*\): build the model and its batch without a device"
    ):
        trace_model(on_cuda, precision="fp32")


def test_outputs_that_lead_nowhere_are_told():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(A, C)

        def forward(self, x):
            return self.layer(x).argmax(1)

    with pytest.raises(
        PlanError, match=r"the model gave a tensor of shape .*, and nothing in it leads back to its parameters"
    ):
        trace_model(lambda: (Silent(), batch()), precision="fp32")


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"optimizer": "Adamw"}, r"optimizer='Adamw' is not in torch.optim: use one of .*AdamW"),
        ({"optimizer": lambda parameters: 3}, "optimizer gave a int: give a name of torch.optim, or a function"),
        ({"precision": "half"}, "precision='half' is not known: use one of 'auto', 'fp32', 'bf16', 'fp16'"),
        ({"target": "tpu"}, "target='tpu' is not known: use one of 'cuda', 'cpu'"),
    ],
)
def test_wishes_that_are_not_known_list_the_choices(wish, text):
    with pytest.raises(PlanError, match=text):
        trace_model(lambda: (net(), batch()), **wish)
