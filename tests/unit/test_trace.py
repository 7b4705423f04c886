"""Traced profiles: bytes and FLOPs calculated by hand, and compared with real tensors."""

import re
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from samestep.errors import MeasurementTooSlow
from samestep.messages import format_bytes
from samestep.parallel.submodules import checkpoint_activations
from samestep.planner import trace
from samestep.planner.model_profile import ModelProfile, PeakMemory
from samestep.planner.trace import StepConfig, StepTracer, trace_model
from samestep.planner.traced_model import MeasuredOnCpu, build_model

A, H, C = 32, 64, 10
LENGTH = 48


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path_factory, monkeypatch):
    # torch sets this permanently when activation checkpointing first imports its compiler
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


class Block(nn.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.drop = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU()), nn.Dropout(0.1)
        self.last = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).reshape(x.shape))
        return x + self.drop(self.last(self.mlp(x)))


class Words(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, depth=3, width=16, tied=True):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(**options):
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) % 50
    return Words(**options), (ids, ids)


def mlp():
    model = nn.Sequential(nn.Linear(A, H, bias=False), nn.ReLU(), nn.Linear(H, C, bias=False))
    return model, torch.zeros(4, A), lambda model, batch: model(batch).sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peak(profile: ModelProfile) -> PeakMemory:
    assert isinstance(profile.activations, PeakMemory)
    return profile.activations


def test_activations_of_an_mlp_match_a_calculation_by_hand():
    profile = trace_model(mlp, optimizer="SGD", precision="fp32", target="cpu")
    weights = 4 * (A * H + H * C)
    assert (profile.weights, profile.gradients, profile.optimizer_state) == (weights, weights, 0)
    # the peak with many samples is ReLU's backward: the input, ReLU's output, the gradients of its output and input,
    # the loss, its gradient, 8 bytes per sample of keys for the sample RNG, and one weight's gradient
    per_sample = 4 * (A + 3 * H) + 8
    assert peak(profile).per_sample == per_sample
    largest = max(peak(profile).points, key=lambda m: m.per_sample)
    assert largest.gradients == 4 * H * C
    assert largest.fixed == 2 * 4
    samples = 1000
    assert profile.persistent + profile.activations.at(samples) == weights + 4 * H * C + 2 * 4 + per_sample * samples


def test_parameters_gradients_and_optimizer_state_are_counted_to_the_byte():
    def build():
        model = nn.Sequential(nn.Linear(A, H), nn.BatchNorm1d(H), nn.Linear(H, C)).to(torch.float64)
        model[0].requires_grad_(False).half()
        return model, torch.zeros(4, A), lambda model, batch: model[1:](model[0](batch.half()).double()).sum()

    profile = trace_model(build, optimizer="AdamW", precision="fp32")
    trained, parts = 2 * H + H * C + C, 4
    assert profile.trainable == {"float64": 8 * trained}
    assert profile.frozen == {"float16": 2 * (A * H + H)}
    assert profile.buffers == 8 * 2 * H + 8  # mean, variance and a counter
    assert profile.gradients == 8 * trained
    assert profile.optimizer_state == 2 * 8 * trained + 4 * parts  # two states per parameter, and a step counter
    assert [(part.name, part.trainable, part.frozen) for part in profile.frozen_parts] == [("0", 0, 2 * (A * H + H))]
    assert profile.weights == sum(profile.trainable.values()) + sum(profile.frozen.values()) + profile.buffers


@pytest.mark.parametrize("through", [True, False])
def test_a_frozen_part_whose_inner_module_is_called_counts_and_says_whether_gradients_flow_through_it(through):
    def build():
        frozen = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, C)).requires_grad_(False)
        model = nn.ModuleDict({"first": nn.Linear(A, H), "frozen": frozen})

        def loss(model, batch):
            hidden, inner = model["first"](batch), model["frozen"][:2]
            return inner(hidden).sum() if through else (hidden - inner(hidden.detach())).sum()

        return model, torch.zeros(4, A), loss

    (part,) = trace_model(build, precision="fp32").frozen_parts
    assert (part.name, part.forward_flops, part.needs_gradient) == ("frozen", 2 * H * H, through)


def test_momentum_of_sgd_needs_as_much_memory_as_the_weights():
    profile = trace_model(mlp, optimizer=sgd, precision="fp32")
    assert (profile.optimizer, profile.optimizer_state) == ("SGD", profile.weights)


@pytest.mark.slow
def test_tied_weights_count_once():
    tied = trace_model(words, precision="fp32")
    untied = trace_model(lambda: words(tied=False), precision="fp32")
    assert untied.weights - tied.weights == untied.gradients - tied.gradients == 50 * 16 * 4


def test_a_model_larger_than_memory_can_be_traced():
    profile = trace_model(lambda: (nn.Linear(500_000, 500_000), torch.zeros(2, 500_000)), precision="fp32")
    assert profile.weights == 4 * (500_000**2 + 500_000)
    assert profile.method == "traced without memory"


@pytest.mark.slow
def test_a_model_may_be_converted_and_tied_while_it_is_built():
    def build():
        model = Words().bfloat16()
        return model.to(memory_format=torch.contiguous_format), torch.zeros(2, 6, dtype=torch.long)

    profile = trace_model(build, precision="fp32")
    assert set(profile.trainable) == {"bfloat16"}
    assert profile.method == "traced without memory"


def words_and_loss():
    return (*words(), lambda model, batch: cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()))


@cache
def profile_of_words(precision, target):
    return trace_model(words_and_loss, optimizer=sgd, precision=precision, target=target)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_trace_predicts_the_memory_of_real_tensors(precision, checkpointed, target):
    """The same tracker over a real step of 24 samples finds the memory that was predicted from 4 and 8 samples."""
    from contextlib import nullcontext

    from samestep.planner.cuda_emulation import emulate_cuda

    profile = profile_of_words(precision, target)
    traced = build_model(words_and_loss, None)
    with emulate_cuda() if target == "cuda" else nullcontext():
        dtype = {"fp32": None, "fp16": torch.float16}[precision]
        tracer = StepTracer(traced, StepConfig(sgd, dtype, target), 4)
        if checkpointed:
            checkpoint_activations(traced.model, (Block,))
        real = max(sample.used for sample in tracer.trace(24).timeline)
    working = profile.checkpointed_activations if checkpointed else profile.activations
    assert working is not None
    predicted = profile.persistent + working.at(24)
    if target == "cuda":  # cuBLAS, and the next batch
        predicted -= 64 * 2**20 + 24 * 2 * LENGTH * 8
    assert predicted == pytest.approx(real, rel=0.002 if target == "cpu" else 0.02)  # rounding is not linear


@pytest.mark.slow
def test_activation_checkpointing_needs_less_memory_and_more_flops():
    profile = trace_model(lambda: words(depth=8), precision="fp32")
    assert profile.checkpointed_activations is not None
    assert profile.checkpointed_activations.per_sample < 0.6 * profile.activations.per_sample
    blocks = sum(block.forward_flops for block in profile.blocks)
    last = profile.blocks[-1]
    assert len(profile.blocks) == 8
    assert blocks == pytest.approx(8 * last.forward_flops)
    assert profile.step_flops < profile.checkpointed_step_flops <= profile.step_flops + blocks


def test_a_model_without_blocks_has_no_checkpointed_activations():
    profile = trace_model(mlp, precision="fp32")
    assert profile.checkpointed_activations is None
    assert profile.checkpointed_step_flops == profile.step_flops


def test_flops_are_counted_per_sample_and_per_operator():
    profile = trace_model(mlp, optimizer="SGD", precision="fp32")
    forward = 2 * (A * H + H * C)
    assert profile.forward_flops == forward
    assert profile.step_flops == 2 * forward + 2 * H * C  # the first layer computes the gradient of its weight only
    products = [op for op in profile.ops if op.flops]
    assert {op.name for op in products} == {"aten.mm"}
    assert sum(op.flops for op in products) == profile.step_flops * profile.traced_samples
    assert all(op.dtype == "float32" for op in products)
    relu = next(op for op in profile.ops if op.name == "aten.relu")
    assert (relu.count, relu.bytes_moved) == (1, 2 * 4 * H * profile.traced_samples)


def test_a_foreach_optimizer_needs_temporaries():
    def large():
        return nn.Linear(1000, 1000, bias=False), torch.zeros(2, 1000)

    fused, at_once = (trace_model(large, optimizer=name, precision="fp32") for name in ("AdamW", "RMSprop"))
    assert at_once.activations.at(1) - fused.activations.at(1) >= 0.99 * 4 * 1000**2


def test_the_loss_is_the_models_own_or_the_cross_entropy_or_the_sum():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(A, C)

        def forward(self, x, labels=None):
            out = self.layer(x)
            return out if labels is None else {"loss": cross_entropy(out, labels), "logits": out}

    x, y = torch.zeros(4, A), torch.zeros(4, dtype=torch.long)
    given = trace_model(lambda: (Own(), {"x": x, "labels": y}), precision="fp32", target="cpu")
    by_pair = trace_model(lambda: (nn.Linear(A, C), (x, y)), precision="fp32", target="cpu")
    summed = trace_model(lambda: (nn.Linear(A, C), x), precision="fp32", target="cpu")
    assert any(op.name == "aten.nll_loss_forward" for op in by_pair.ops)
    assert any(op.name == "aten.nll_loss_forward" for op in given.ops)
    assert not any(op.name == "aten.nll_loss_forward" for op in summed.ops)


class NeedsValues(nn.Module):
    """Needs the values of its output."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(A, C), how

    def forward(self, x):
        out = self.layer(x)
        if self.how == "item":
            return out * (2 if out.sum().item() > 0 else 1)
        if self.how == "numpy":
            return out * float(out.detach().numpy().mean())
        if self.how == "nonzero":
            return out[out.sum(1).nonzero()[:, 0]]
        if self.how == "masked_select":
            return out.masked_select(out.sum(1, keepdim=True) > 0)
        if self.how == "half of the rows":
            smaller = out.sum(1).argsort().argsort() < len(x) // 2
            return out[smaller].view(len(x) // 2, C)
        return torch.cat([out, out[out.sum(1) > 0]])


@pytest.mark.parametrize("how", ["nonzero", "mask", "masked_select"])
def test_a_mask_that_depends_on_values_counts_as_if_it_selected_everything(how):
    profile = trace_model(lambda: (NeedsValues(how), torch.ones(16, A)), optimizer="SGD", precision="fp32")
    assert profile.method == (
        "traced without memory; a mask selects elements by values, which a trace does not have (nonzero(), or a mask "
        "as an index): all elements count, so memory and time are upper bounds"
    )

    class Everything(NeedsValues):
        def forward(self, x):
            out = self.layer(x)
            rows = torch.arange(len(x))
            if how == "masked_select":
                return out[rows[:, None], torch.arange(C)].flatten()
            return out[rows] if how == "nonzero" else torch.cat([out, out[rows]])

    everything = trace_model(lambda: (Everything(how), torch.ones(16, A)), optimizer="SGD", precision="fp32")
    assert everything.method == "traced without memory"
    assert profile.activations.at(64) == pytest.approx(everything.activations.at(64), rel=0.01)


def test_a_mask_from_labels_is_traced_with_the_number_of_elements_that_it_selects():
    class Detector(nn.Linear):
        def forward(self, x, labels):
            inside = labels >= 0
            return super().forward(torch.cat([x[inside]] * 100)), inside.nonzero(), x.masked_select(inside[..., None])

    def profile(count):
        labels = torch.full((4, 10), -1)
        labels[:, :count] = 3
        return trace_model(lambda: (Detector(A, C), (torch.zeros(4, 10, A), labels)), precision="fp32", target="cpu")

    few, many = profile(2), profile(8)
    assert few.method == many.method == "traced without memory"
    assert 3.5 < many.activations.per_sample / few.activations.per_sample < 4.5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("item", ".item(), float() or `if` of a tensor"),
        ("half of the rows", "nonzero(), or a mask as an index"),  # a view fails if all are selected
        ("numpy", ".numpy() of a tensor"),
    ],
)
def test_a_model_that_needs_values_is_measured_and_the_profile_says_so(how, message):
    profile = trace_model(lambda: (NeedsValues(how), torch.ones(16, A)), optimizer="SGD", precision="fp32")
    assert profile.method.startswith(
        "measured with real micro-batches of 2 and 4 samples on the CPU, since a step needs values, which a trace "
        f"does not have ({message})"
    )
    assert profile.weights == 4 * (A * C + C)
    assert profile.activations.per_sample > 4 * (A + C)


def test_weights_on_the_meta_device_are_measured_with_small_values_and_stay_tied():
    def build(device):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(A, A), nn.Linear(A, A, bias=False), NeedsValues("item"))
        model[1].weight = model[0].weight
        return model, torch.ones(16, A)

    on_meta, on_cpu = (
        trace_model(lambda: build(device), optimizer="SGD", precision="fp32")  # noqa: B023
        for device in ("meta", "cpu")
    )
    assert on_meta.method == on_cpu.method
    assert on_meta.weights == on_cpu.weights == 4 * (A * A + A + A * C + C)
    assert on_meta.activations == on_cpu.activations


def test_a_measurement_that_takes_too_long_raises_and_states_a_lower_bound(monkeypatch):
    monkeypatch.setattr(trace, "MEASURE_SECONDS", 0.0)
    message = (
        "A step of NeedsValues needs values, which a trace does not have (.item(), float() or `if` of a tensor), and "
        "steps of 2 and 4 samples take more than 0 s on the CPU. So the memory of activations is unknown; weights, "
        f"gradients and Adam's two moments need {format_bytes(16 * (A * C + C))}, which is a lower bound. Compute "
        "without these values, or plan with fewer layers."
    )
    for precision in ("fp32", "bf16"):
        with pytest.raises(MeasurementTooSlow, match=f"^{re.escape(message)}$"):
            trace_model(lambda: (NeedsValues("item"), torch.ones(16, A)), precision=precision)


def test_half_precision_is_measured_in_fp16():
    profile = trace_model(lambda: (NeedsValues("item"), torch.ones(16, A)), precision="bf16")
    assert profile.method.startswith("measured with real micro-batches")
    assert {op.dtype for op in profile.ops if op.flops} == {"float16"}


def test_a_measurement_needs_the_memory_of_a_trace():
    """A measurement multiplies in fp32, since most CPUs are very slow in fp16, but stores fp16."""

    class Images(nn.Sequential):
        def __init__(self, needs_value):
            super().__init__(nn.Conv2d(3, 16, 3, 2), nn.GELU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.LazyLinear(C))
            self.needs_value = needs_value
            super().forward(torch.zeros(2, 3, 32, 32))

        def forward(self, x):
            out = super().forward(x)
            return out * (2 if self.needs_value and out.sum().item() > 0 else 1)

    measured, traced = (
        trace_model(lambda: (Images(value), torch.ones(4, 3, 32, 32)), optimizer="SGD", precision="fp16")  # noqa: B023
        for value in (True, False)
    )
    assert measured.method.startswith("measured")
    assert traced.method.startswith("traced")
    assert measured.activations.at(32) == pytest.approx(traced.activations.at(32), rel=0.02)


def test_products_in_fp32_have_the_dtype_and_the_layout_of_products_in_half_precision():
    image, weight = torch.randn(2, 3, 8, 8).half(), torch.randn(4, 3, 3, 3).half()
    image = image.contiguous(memory_format=torch.channels_last)
    plain = torch.conv2d(image, weight)
    with MeasuredOnCpu(600.0, MeasurementTooSlow()):
        found = torch.conv2d(image, weight)
        assert (image.flatten(1) @ image.flatten(1).T).dtype == torch.half
        assert torch.conv2d(image.float(), weight.float()).dtype == torch.float32
    assert (found.dtype, found.stride()) == (plain.dtype, plain.stride())
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2)


def test_integers_keep_their_values_in_a_trace():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(A, C)

        def forward(self, x, mask):
            if mask.all().item():  # nothing is masked
                return self.layer(x)
            return torch.cat([self.layer(x)] * 100)

    def build(keep):
        mask = torch.ones(4, 3, dtype=torch.bool)
        mask[0, 0] = keep
        return Masked(), (torch.zeros(4, A), mask)

    short = trace_model(lambda: build(True), precision="fp32")
    long = trace_model(lambda: build(False), precision="fp32")
    assert short.method == long.method == "traced without memory"
    assert long.activations.per_sample > 10 * short.activations.per_sample


def test_a_build_function_that_needs_values_is_run_with_memory():
    def build():
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        return nn.Sequential(nn.Linear(A, C), nn.Dropout(rates[2])), torch.zeros(4, A)

    profile = trace_model(build, precision="fp32")
    assert profile.method.startswith("traced, but built with memory, since it cannot be built without (")
    assert profile.weights == 4 * (A * C + C)
