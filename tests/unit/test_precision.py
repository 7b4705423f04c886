"""Precision: the choice and its reason, autocast, the loss scale, activation checkpointing, compilation."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.data.sample_rng import micro_batch_keys, uniform
from samestep.errors import CommunicationError, ConfigError, StepError, WrapError
from samestep.parallel.precision import (
    ComputePrecision,
    PrecisionSupport,
    choose_precision,
    compute_in,
    in_fp32,
    set_fp32_products,
    turn_on_fused,
)
from samestep.parallel.wrap import report_large_outputs
from samestep.torch_private import multiply_all

CPU = PrecisionSupport("cpu", bf16=False, tf32=False, requested="auto", compile=False)
MPS = dataclasses.replace(CPU, device="mps")
V100 = dataclasses.replace(CPU, device="cuda")
H200 = PrecisionSupport("cuda", bf16=True, tf32=True, requested="auto", compile=False)


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # torch sets this permanently when it first compiles, which activation checkpointing triggers
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def support(requested, *ranks):
    return [dataclasses.replace(rank, requested=requested) for rank in ranks]


@pytest.mark.parametrize(
    ("everyone", "name", "tf32", "reason"),
    [
        ([CPU], "fp32", False, "auto, on the CPU"),
        ([MPS], "fp32", False, "auto, on an Apple GPU"),
        ([V100], "fp32", False, "auto: the GPUs of rank(s) 0 do not support bf16"),
        ([H200], "bf16", True, "auto: the GPU supports it"),
        ([H200, H200], "bf16", True, "auto: every GPU supports it"),
        ([H200, V100, H200], "fp32", False, "auto: the GPUs of rank(s) 1 do not support bf16"),
        (support("fp32", H200), "fp32", False, "as requested"),
        (support("fp16", H200), "fp16", True, "as requested"),
        (support("fp16", V100), "fp16", False, "as requested"),
        (support("bf16", CPU), "bf16", False, "as requested"),
        (support("fp64", H200), "fp64", False, "as requested"),
        ([dataclasses.replace(CPU, requested="fp64", variable="X")], "fp64", False, "by X"),
    ],
)
def test_precision_follows_what_every_rank_supports(everyone, name, tf32, reason):
    chosen = choose_precision(everyone)
    assert (chosen.name, chosen.tf32, chosen.reason) == (name, tf32, reason)
    assert chosen.strict == (everyone[0].requested == "fp32")


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        (
            support("bf16", H200, V100),
            r"which the GPUs of rank\(s\) 1 do not have: use precision='fp16' or 'fp32'",
        ),
        (support("fp64", MPS), "precision='fp64' is not supported on Apple GPUs: use precision='fp32', or omit it"),
        (support("fp16", MPS), "precision='fp16' is not supported on Apple GPUs: use precision='fp32', or omit it"),
    ],
)
def test_an_unsupported_precision_raises(everyone, message):
    with pytest.raises(ConfigError, match=message):
        choose_precision(everyone)


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        (
            [*support("bf16", H200), *support("fp32", H200)],
            r"rank 0 has Run\(precision='bf16', compile=False\) and rank 1 has Run\(precision='fp32', compile=False\)",
        ),
        ([H200, dataclasses.replace(H200, compile=True)], "pass the same values on all ranks"),
    ],
)
def test_different_precisions_on_two_ranks_raise(everyone, message):
    with pytest.raises(CommunicationError, match=message):
        choose_precision(everyone)


def test_an_unknown_precision_raises_with_the_choices():
    with pytest.raises(ConfigError, match="precision='int8' is not valid: use one of 'auto', 'fp32', 'bf16', 'fp16'"):
        Run(global_batch=4, precision="int8")


def test_the_choice_is_printed_in_one_line():
    fast = ComputePrecision("bf16", tf32=True, strict=False, compile=False, reason="auto: the GPU supports it")
    assert str(fast) == (
        "precision: bf16 (auto: the GPU supports it), TF32 for fp32 products; torch.compile off; "
        "flash attention if SDPA selects it"
    )
    exact = ComputePrecision("fp32", tf32=False, strict=True, compile=True, reason="as requested")
    assert str(exact) == (
        "precision: fp32 (as requested), no TF32; torch.compile on (recompiles for new shapes, a few times at most)"
    )


def settings():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_tf32_is_set_and_then_restored():
    before = settings()
    restore = set_fp32_products(ComputePrecision("bf16", tf32=True, strict=False, compile=False, reason=""))
    assert settings() == ("high", True)
    restore()
    restore = set_fp32_products(ComputePrecision("fp32", tf32=False, strict=True, compile=False, reason=""))
    assert settings() == ("highest", False)
    restore()
    assert settings() == before


def test_strict_fp32_is_restored_at_the_end_of_the_run_also_after_a_failure():
    before = settings()
    with Run(global_batch=4, precision="fp32"):
        assert settings() == ("highest", False)
    assert settings() == before
    with pytest.raises(ZeroDivisionError), Run(global_batch=4, precision="fp32"):
        print(1 / 0)
    assert settings() == before


@pytest.mark.slow
def test_settings_that_torch_does_not_combine_raise():
    script = (
        "import torch; from samestep import Run\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "Run(global_batch=4, precision='fp32').start()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ConfigError: the script sets torch.backends.*.fp32_precision" in ended.stderr
    assert "use Run(precision='fp32') for full fp32 or 'auto' for TF32" in ended.stderr


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


class Answer(OrderedDict):
    """A mapping class like those of libraries."""


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    note: str


def test_outputs_are_converted_to_fp32_and_keep_their_classes():
    half, double = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64)
    given = {
        "pair": Pair(half, [half, 3, None]),
        "answer": Answer(x=half),
        "record": Record(half, "kept"),
        "own": double,
    }
    back = in_fp32(given)
    assert type(back["pair"]) is Pair
    assert back["pair"].first.dtype == back["pair"].second[0].dtype == torch.float32
    assert back["pair"].second[1:] == [3, None]
    assert type(back["answer"]) is Answer
    assert back["answer"]["x"].dtype == torch.float32
    assert (back["record"].logits.dtype, back["record"].note) == (torch.float32, "kept")
    assert back["own"] is double
    assert given["answer"]["x"] is half  # the original output is not changed


class Logits(nn.Module):
    """Outputs of any size that need no memory."""

    def forward(self, shape):
        return {"hidden": torch.zeros(2, 2), "logits": torch.zeros(()).expand(shape)}


@pytest.mark.parametrize("whole", [True, False])
def test_large_outputs_of_a_compiled_model_are_reported_once(whole):
    model, reports = Logits(), []
    report_large_outputs(model, reports.append, whole)
    with torch.no_grad():
        model((32, 1024, 50304))
    assert not reports  # an evaluation computes no gradients, which would need more memory
    for _ in range(2):
        model((32, 1024, 50304))
    other = ", or any other loss, which is then compiled, too" if whole else ""
    assert reports == [
        "the compiled model returns a tensor of shape (32, 1024, 50304); a loss that is computed outside of it holds "
        "6.1 GiB for each fp32 copy of it. To save memory and time, compute the loss in forward: "
        f"samestep.nn.linear_cross_entropy for a language model{other}. Or compile the function that computes the loss "
        "with torch.compile"
    ]


def test_small_outputs_of_a_compiled_model_are_not_reported():
    model, reports = Logits(), []
    report_large_outputs(model, reports.append, True)
    model((8, 1024, 32000))
    assert not reports


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x, fail=False):
        out = self.linear(x)
        self.seen = out.dtype
        if fail:
            raise ValueError("no")
        return out


def test_autocast_ends_with_the_call_also_after_an_exception():
    model = Picky()
    compute_in(model, torch.device("cpu"), torch.float16)
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model.seen == torch.float16
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(2, 4), fail=True)
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(2, 4)).dtype == torch.float32


class Block(nn.Module):
    """A block with random numbers of torch and of the samples."""

    def __init__(self, width=8):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(width, width), nn.LayerNorm(width), 0

    def forward(self, x, *, scale=1.0, debug=False):
        self.calls += 1
        keys = micro_batch_keys()
        kept = 1.0 if keys is None else (uniform(keys, (1,), 1) > 0.3).float()
        return x + scale * torch.dropout(torch.relu(self.linear(self.norm(x))) * kept, 0.2, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5, debug=True)
        return self.head(x)


def data(n=20):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def train(run, model, epochs=2, scale_loss=lambda losses, step: losses, learning_rate=0.01, **shard):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    seen = []
    for epoch in run.shard(data(), shuffle=True, **shard).epochs(epochs):
        for step in epoch:
            for inputs, labels in step:
                losses = cross_entropy(model(inputs), labels, reduction="none")
                step.mean(scale_loss(losses, step)).backward()
            seen.append((step, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def trained(**wrap):
    with Run(global_batch=8, seed=0) as run:
        torch.manual_seed(3)
        model = run.wrap(Net(), **wrap)
        torch.manual_seed(4)
        train(run, model, micro_batch=4)
        calls = [block.calls for block in model.blocks]
        return {name: value.clone() for name, value in model.named_parameters()}, calls


def test_activation_checkpointing_changes_no_number_and_no_name():
    plain, calls = trained()
    again, calls_again = trained(activation_checkpointing=(Block,))
    assert list(again) == list(plain)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert calls_again == [2 * count for count in calls]


def test_activation_checkpointing_does_nothing_without_gradients():
    with Run(global_batch=8) as run:
        model = run.wrap(Net(), activation_checkpointing=(Block,))
        with run.evaluate(model) as net:
            net(torch.ones(1, 8))
        assert [block.calls for block in model.blocks] == [1, 1]


def test_a_block_inside_another_is_not_computed_four_times():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            return self.inner(x)

    with Run(global_batch=8) as run:
        model = run.wrap(nn.Sequential(Outer(), Block()), activation_checkpointing=(Outer, Block))
        model(torch.ones(2, 8)).sum().backward()
        assert (model[0].inner.calls, model[1].calls) == (2, 2)


def test_activation_checkpointing_of_an_unknown_class_lists_the_known_ones():
    message = (
        r"activation_checkpointing=\(Conv2d,\) matches no module of Net: its submodules are of class Block, LayerNorm, "
        "Linear, ModuleList"
    )
    with Run(global_batch=8) as run, pytest.raises(WrapError, match=message):
        run.wrap(Net(), activation_checkpointing=(nn.Conv2d,))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)
        self.order = None

    def forward(self, x, *, mask=None):
        self.order = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, mask)]
        return self.head(self.conv(x).mean((2, 3)))


def test_channels_last_converts_weights_and_inputs_and_keeps_the_values():
    torch.manual_seed(0)
    plain, images = Images(), torch.randn(2, 3, 8, 8)
    expected = plain(images, mask=images)
    with Run(global_batch=8) as run:
        model = run.wrap(plain, channels_last=True)
        got = model(images, mask=images)
        assert model.order == [True, True]
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(got, expected, atol=1e-6)
        with pytest.raises(WrapError, match="channels_last=True does not work with FSDP, which shards weights"):
            run.wrap(Images(), "fsdp", channels_last=True)


def test_multiply_all_multiplies_every_tensor():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    multiply_all(tensors, 0.5)
    multiply_all([], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def test_fp16_gradients_and_loss_are_unscaled():
    def one(precision):
        with Run(global_batch=8, seed=0, precision=precision) as run:
            torch.manual_seed(3)
            step, grads = train(run, run.wrap(nn.Linear(8, 3)), epochs=1)[0]
            assert step.finite()
            return float(step.loss), grads

    loss, grads = one("fp32")
    loss16, grads16 = one("fp16")
    assert loss16 == pytest.approx(loss, rel=2e-3)
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(grads16, grads, strict=True))
    assert all(gradient.dtype == torch.float32 for gradient in grads16)


def test_a_step_that_overflows_in_fp16_changes_nothing_and_halves_the_scale(capsys):
    with Run(global_batch=8, seed=0, precision="fp16") as run:
        model = run.wrap(nn.Linear(8, 3))
        scale = run._lifecycle.context.acceleration.loss_scale
        blown = train(run, model, epochs=1, scale_loss=lambda losses, step: losses * (1e6 if step.number == 0 else 0))
        assert [gradient for _, grads in blown[:1] for gradient in grads] == [None, None]
        assert not any(grad is None for _, grads in blown[1:] for grad in grads)
        assert scale.factor == 32768.0
        assert [step.number for step, _ in blown] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert (
        "step 0: a gradient overflowed in fp16 at loss scale 65536; all ranks drop this step and continue with loss "
        "scale 32768" in printed
    )
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["choices"]["loss_scale"] == 32768.0


def test_a_dropped_step_is_not_finite_and_changes_no_weight():
    with Run(global_batch=20, seed=0, precision="fp16") as run:
        model = run.wrap(nn.Linear(8, 3))
        before = [p.detach().clone() for p in model.parameters()]
        [(step, _)] = train(run, model, epochs=1, scale_loss=lambda losses, _: losses * 1e6)
        assert not step.finite()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gradients_of_an_earlier_step_are_accumulated_correctly_in_fp16():
    def total(precision):
        with Run(global_batch=10, seed=0, precision=precision) as run:
            torch.manual_seed(3)
            model = run.wrap(nn.Linear(8, 3))
            for epoch in run.shard(data()).epochs(1):
                for step in epoch:
                    for inputs, labels in step:
                        step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
            return model.weight.grad.clone()

    assert torch.allclose(total("fp16"), total("fp32"), rtol=1e-2, atol=1e-3)


def test_the_loss_scale_grows_after_2000_finite_steps_and_is_restored_from_its_state():
    with Run(global_batch=8, precision="fp16") as run:
        run.wrap(nn.Linear(8, 3))
        scale, models = run._lifecycle.context.acceleration.loss_scale, run._lifecycle.context.models
        for number in range(1999):
            assert scale.unscale(models, number) is None
        state = scale.state_dict()
        scale.unscale(models, 1999)
        assert scale.factor == 131072.0
        scale.load_state_dict(state)
        assert scale.factor == 65536.0
        scale.unscale(models, 1999)
        assert scale.factor == 131072.0


def test_gradients_that_never_become_finite_end_the_run():
    with Run(global_batch=8, precision="fp16") as run:
        model = run.wrap(nn.Linear(8, 3))
        scale, models = run._lifecycle.context.acceleration.loss_scale, run._lifecycle.context.models
        for number in range(30):
            model.weight.grad = torch.full_like(model.weight, torch.nan)
            assert "a gradient overflowed" in scale.unscale(models, number)
        model.weight.grad = torch.full_like(model.weight, torch.nan)
        with pytest.raises(StepError, match=r"of step 30 are not finite even at a loss scale of 6\.10352e-05, so the"):
            scale.unscale(models, 30)


def test_fp16_weights_raise_with_fp16_precision():
    message = "parameter 'weight' is fp16: pass the model without .half\\(\\), or model.float\\(\\)"
    with Run(global_batch=8, precision="fp16") as run, pytest.raises(WrapError, match=message):
        run.wrap(nn.Linear(8, 3).half())


def test_optimizers_of_cpu_parameters_are_not_changed():
    model = nn.Linear(2, 2)
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.Adagrad(model.parameters())):
        assert not turn_on_fused(optimizer)
        assert optimizer.param_groups[0]["fused"] is None


def test_the_choices_are_printed_once_and_kept_in_the_summary(capsys):
    with Run(global_batch=8, seed=0) as run:
        train(run, run.wrap(nn.Linear(8, 3)), epochs=1)
        run.wrap(nn.Linear(2, 2))
    assert capsys.readouterr().out.count("precision: fp32 (auto, on the CPU); torch.compile off\n") == 1
    summary = json.loads((run.folder / "summary.json").read_text())
    expected = {"precision": "fp32", "reason": "auto, on the CPU", "tf32": False, "compile": False, "fused": []}
    assert summary["choices"] == expected


def compiled_and_not(check):
    weights = []
    for compile in (False, True):
        with Run(global_batch=8, seed=0, compile=compile) as run:
            torch.manual_seed(3)
            net = Net()
            model = run.wrap(net)
            torch.manual_seed(4)
            train(run, model)
            with run.evaluate(model) as evaluated:
                evaluated(torch.ones(1, 8))
            if compile:
                check(run._lifecycle.context.models[0], net)
            weights.append([p.detach().clone() for p in net.parameters()])
    return weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
def test_a_compiled_model_keeps_its_names_and_is_evaluated_as_compiled():
    def check(wrapped, net):
        assert wrapped.inner is net
        assert wrapped.core is wrapped.model is not net
        assert not any("_orig_mod" in name for name, _ in wrapped.inner.named_parameters())

    with torch.compiler.set_stance("force_eager"):
        plain, compiled = compiled_and_not(check)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


COMPILED = """
import torch
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
from samestep import Run

with Run(global_batch=8, seed=0, compile=True) as run:
    model = run.wrap(torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Tanh()))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in run.shard(TensorDataset(torch.randn(20, 8))).epochs(4):  # steps of 8, 8 and 4 samples
        for step in epoch:
            for (inputs,) in step:
                step.mean(model(inputs).square().sum(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("graphs", counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_model_is_compiled_and_recompiled_once_for_the_smaller_last_step():
    # no test programs for each kind of vector instructions, and no pool of processes that import torch
    quick = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", COMPILED]
    ended = subprocess.run(command, env=os.environ | quick, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("graphs")] == ["graphs 2"] * 4
