"""Errors of traces: each says what is wrong and what to do."""

import pytest
import torch
from torch import nn

from samestep.errors import PlanError
from samestep.planner.trace import trace_model

A, C = 8, 3


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path_factory, monkeypatch):
    # torch sets this permanently when it first imports its compiler
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
            r"failing\(\) failed \(FileNotFoundError: weights.pt is not there\)\. Call it on its own to see the "
            r"traceback\.",
        ),
        (
            asking_for_cuda,
            r"asking_for_cuda\(\) needs CUDA \(AssertionError: Torch not compiled with CUDA enabled\)\. Build the "
            r"model and its batch without a device: a plan does not need one, and Run moves them to its device\.",
        ),
        (net, r"net\(\) returned a Linear. Return a model and an example batch: def build\(\): return Net\(\), \("),
        (lambda: (net(),), r"returned a tuple of 1. Return a model and an example batch"),
        (lambda: (batch(), net()), r"returned a tensor of shape \(4, 8\) as its model. Return an nn.Module first"),
        (
            lambda: (net().requires_grad_(False), batch()),
            "Linear has no trainable parameters. A plan is made for training.",
        ),
        (
            lambda: (net(), None),
            "returned None as its example batch. Return tensors with samples along their first dimension",
        ),
        (lambda: (net(), torch.zeros(0, A)), r"returned a tensor of shape \(0, 8\) as its example batch"),
        (lambda: (net(), object()), "returned an invalid example batch: "),
        (
            lambda: (net(), batch(), 0.5),
            "returned a float as its third value. Omit it, or return a function of model and batch that returns the",
        ),
        (
            lambda: (net(), torch.zeros(4, A + 1)),
            r"Linear cannot be called with the example batch \(RuntimeError: .*\)\. Return the batch in the form "
            "that the model takes, or return a third value from the build function, lambda model, batch: loss, that",
        ),
        (
            lambda: (net(), batch(), lambda model, batch: 3),
            r"loss function returned a int, but must return a tensor with gradients, for example lambda model, batch: "
            r"cross_entropy\(model\(batch\[0\]\), batch\[1\]\)",
        ),
    ],
)
def test_an_invalid_build_function_is_explained(build, text):
    with pytest.raises(PlanError, match=text):
        trace_model(build, precision="fp32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the model is built there, and refused for that")
def test_a_build_function_that_needs_cuda_is_explained():
    with pytest.raises(
        PlanError, match=r"on_cuda\(\) needs CUDA \(.*\)\. Build the model and its batch without a device"
    ):
        trace_model(on_cuda, precision="fp32")


def test_outputs_without_gradients_raise():
    class NoGradient(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(A, C)

        def forward(self, x):
            return self.layer(x).argmax(1)

    with pytest.raises(PlanError, match=r"The model returned a tensor of shape .*, which has no gradients"):
        trace_model(lambda: (NoGradient(), batch()), precision="fp32")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "Adamw"}, r"optimizer='Adamw' is not in torch.optim. Use one of .*AdamW"),
        (
            {"optimizer": lambda parameters: 3},
            "The optimizer function returned a int. Pass the name of a class in torch.optim, or a function",
        ),
        ({"precision": "half"}, "Unknown precision 'half'. Use one of 'auto', 'fp32', 'bf16', 'fp16'"),
        ({"target": "tpu"}, "Unknown target 'tpu'. Use one of 'cuda', 'cpu'"),
    ],
)
def test_unknown_options_list_the_choices(options, text):
    with pytest.raises(PlanError, match=text):
        trace_model(lambda: (net(), batch()), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"optimizer": "LBFGS"},
            r"^optimizer='LBFGS' cannot step after a backward pass \(TypeError: LBFGS.step\(\) missing .*\)\. Use an "
            r"optimizer that needs no closure and supports the gradients of this model, such as AdamW or SGD\.$",
        ),
        ({"optimizer": "SparseAdam"}, r"^optimizer='SparseAdam' cannot step .* does not support dense gradients"),
        (
            {"optimizer": "Muon"},
            r"^optimizer='Muon' does not accept the parameters of this model \(ValueError: .*2D.*\)\. Name another "
            r"class of torch.optim, or pass trace_model\(optimizer=...\) a function of the parameters\.$",
        ),
        (
            {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=-1.0)},
            r"^the optimizer does not accept the parameters of this model \(ValueError: Invalid learning rate",
        ),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_that_cannot_step_is_explained_in_one_line(options, text, precision):
    with pytest.raises(PlanError, match=text) as error:
        trace_model(lambda: (net(), batch()), precision=precision, **options)
    assert "\n" not in str(error.value)


def test_the_other_optimizers_of_torch_can_be_traced():
    for name in ("Adam", "SGD", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adamax"):
        assert trace_model(lambda: (net(), batch()), optimizer=name, precision="fp32").optimizer == name


def test_an_optimizer_that_needs_values_is_measured():
    profile = trace_model(lambda: (net(), batch()), optimizer="Adafactor", precision="fp32")
    assert profile.method.startswith(
        "measured with real micro-batches of 2 and 4 samples on the CPU, since a step needs"
    )


def lazy():
    return nn.Sequential(nn.LazyLinear(A), nn.LazyLinear(C)), batch()


def lazy_called_once():
    model, rows = lazy()
    model(rows)
    return model, rows


def test_lazy_layers_must_be_initialized():
    with pytest.raises(
        PlanError,
        match=r"^Parameter '0.weight' of Sequential belongs to a lazy layer and has no shape yet\. Call the model once "
        r"with the example batch in lazy\(\), then return both\.$",
    ):
        trace_model(lazy, precision="fp32")
    assert trace_model(lazy_called_once, precision="fp32").weights == 4 * (A * A + A + A * C + C)


@pytest.mark.parametrize(
    ("loss", "error_text"),
    [
        (lambda model, batch: model(batch)["loss"], "IndexError: "),
        (lambda model: model, "TypeError: "),
        (lambda model, batch: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_loss_function_that_fails_is_reported_with_its_error(loss, error_text):
    with pytest.raises(PlanError) as error:
        trace_model(lambda: (net(), batch(), loss), precision="fp32")
    assert str(error.value).startswith(f"the loss function failed ({error_text}")
    assert str(error.value).endswith(
        "). It is called with the model and a batch like the example: lambda model, batch: "
        "cross_entropy(model(batch[0]), batch[1])"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is something to move to")
def test_a_loss_function_that_needs_cuda_is_explained():
    with pytest.raises(PlanError, match=r"^the loss function needs CUDA \(.*\)\. Build the model and its batch with"):
        trace_model(lambda: (net(), batch(), lambda model, batch: model(batch.cuda()).sum()), precision="fp32")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise KeyError("no such tensor")


def test_a_backward_pass_that_fails_is_reported_with_its_error():
    def loss(model, batch):
        return FailsInBackward.apply(model(batch)).sum()

    with pytest.raises(
        PlanError,
        match=r"^the backward pass of Linear failed \(KeyError: .no such tensor.\)\. Call loss.backward\(\) on its "
        r"own to see the traceback\.$",
    ):
        trace_model(lambda: (net(), batch(), loss), precision="fp32")


class Experts(nn.Module):
    """Each row goes to one of two experts; a tensor of the input's dtype collects the results."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(A, 2), nn.ModuleList(nn.Linear(A, A) for _ in range(2))

    def forward(self, x):
        chosen, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_failure_in_half_precision_only_is_explained(target):
    with pytest.raises(
        PlanError,
        match=r"^The model fails in bf16 but not in fp32 \(RuntimeError: Index put requires the source and destination "
        r"dtypes match.*\)\. If autocast gives an operation tensors of two dtypes, training fails too\. Convert one "
        r"with .to\(other.dtype\), or use precision fp32\.$",
    ):
        trace_model(lambda: (Experts(), torch.randn(4, A)), precision="bf16", target=target)
    profile = trace_model(lambda: (Experts(), torch.randn(4, A)), precision="fp32", target=target)
    assert profile.method.endswith(
        "(nonzero(), or a mask as an index): all elements count, so memory and time are upper bounds"
    )


def test_a_build_function_that_exits_is_reported():
    def leave():
        raise SystemExit("usage: train.py")

    with pytest.raises(PlanError, match=r"leave\(\) failed \(SystemExit: usage: train"):
        trace_model(leave, precision="fp32")


def test_blocks_can_be_given_by_class_name():
    def stacked():
        return nn.Sequential(*(nn.Sequential(nn.Linear(A, A), nn.ReLU()) for _ in range(3))), batch()

    named = trace_model(stacked, precision="fp32", blocks=["Linear"])
    assert [part.name for part in named.blocks] == ["0.0", "1.0", "2.0"]
    with pytest.raises(
        PlanError,
        match=r"^Sequential has no submodule of class Block\. Name a class that repeats in the model; it has "
        r"Linear, ReLU, Sequential\.$",
    ):
        trace_model(stacked, precision="fp32", blocks=["Block"])
