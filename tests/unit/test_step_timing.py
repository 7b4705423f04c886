"""Step timing: every operation of a traced step runs alone, and all together take about as long as the step."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from samestep.parallel.precision import choose_precision, detect_support
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.model_profile import Op
from samestep.planner.step_recorder import OpCall, OpCost, OpCounter, TensorShape
from samestep.planner.step_timing import host_seconds, replay, time_calls, time_model
from samestep.planner.time_model import op_seconds
from samestep.planner.trace import trace_calls, trace_model

CPU = torch.device("cpu")
FP32 = choose_precision([detect_support(CPU, "fp32", False)])


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces


class Images(nn.Module):
    """Convolutions, and norms for which a GPU has its own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3),
            nn.GroupNorm(4, 32),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Words(nn.Module):
    """An embedding, attention with shared heads, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(50, 64), nn.Dropout(0.1)
        self.query, self.both, self.norm = nn.Linear(64, 64), nn.Linear(64, 32), nn.LayerNorm(64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.drop(self.norm(self.table(tokens)))
        query = self.query(words).unflatten(-1, (4, 16)).transpose(1, 2)
        key, value = self.both(words).unflatten(-1, (2, 16)).transpose(1, 2).repeat_interleave(2, 1).chunk(2, 1)
        key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2) @ self.table.weight.T


def images():
    return Images(), (torch.randn(4, 3, 48, 48), torch.zeros(4, dtype=torch.long))


def words():
    ids = torch.randint(0, 50, (4, 16))
    return Words(), (ids, ids)


def score(model, batch):
    return cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


@pytest.mark.parametrize(("build", "loss"), [(images, None), (words, score)])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_every_operation_of_a_step_can_run_alone(build, loss, target):
    (work,) = trace_calls(build, [4], precision="fp32", loss=loss, target=target)
    assert work.calls
    assert sum(cost.count for cost in work.calls.values()) == sum(op.count for op in work.ops())
    assert sum(cost.flops for cost in work.calls.values()) == work.flops
    found = replay(work.calls, CPU)
    assert [call.func for call in work.calls if call not in found] == []
    assert all(seconds > 0 for seconds in found.values())


def test_operations_that_do_not_fit_in_memory_are_estimated():
    here, work = parse_cluster_spec("cpu:1"), OpCounter(record_calls=True)
    huge = TensorShape((2**46,), (1,), torch.float32)
    assert work.calls is not None
    work.calls[OpCall(torch.ops.aten.add.Tensor, (huge, huge), ())] = OpCost(2, 0.0, 3 * 2.0**49)
    assert replay(work.calls, CPU) == {}
    assert time_calls(work, here, CPU, tf32=False) == op_seconds(
        here, Op("aten.add", 2, 0.0, 3 * 2.0**49, "float32"), tf32=False
    )


@pytest.mark.slow
def test_measured_operations_add_up_to_the_time_of_a_step():
    build = lambda: (nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.randn(256, 512))  # noqa: E731
    profile = trace_model(build, precision="fp32", target="cpu")
    model, batch = build()
    estimated, measured = [], []
    for _ in range(30):  # the minimum of several, and of more while other processes disturb the measurement
        timed = time_model(profile, build, parse_cluster_spec("cpu:1"), CPU, 256, FP32).measured_time
        assert timed is not None
        assert [samples for samples, _ in timed.points] == [128, 256]
        estimated.append(timed.at(256))
        for _ in range(5):
            since = time.perf_counter()
            model(batch).sum().backward()
            measured.append(time.perf_counter() - since)
        if len(estimated) >= 4 and min(measured) / 3 < min(estimated) < 3 * min(measured):
            break
    assert min(measured) / 3 < min(estimated) < 3 * min(measured)


def test_measured_times_name_their_device():
    here = parse_cluster_spec("cpu:2")
    timed = time_model(trace_model(images, precision="fp32", target="cpu"), images, here, CPU, 4, FP32).measured_time
    assert timed is not None
    assert timed.device == here.device.name


class NeedsValues(nn.Linear):
    """Needs a value, which a trace does not have."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch * (2 if batch.sum().item() > 0 else 1))


def test_a_model_that_needs_values_is_not_timed():
    build = lambda: (NeedsValues(4, 4), torch.randn(2, 4))  # noqa: E731
    profile = trace_model(build, precision="fp32", target="cpu")
    assert time_model(profile, build, parse_cluster_spec("cpu:1"), CPU, 4, FP32) == profile


@pytest.mark.parametrize(
    "micro_batch", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_batch_norm_is_timed_with_more_than_one_sample(micro_batch):
    profile = trace_model(images, precision="fp32", target="cpu")
    timed = time_model(profile, images, parse_cluster_spec("cpu:1"), CPU, micro_batch, FP32).measured_time
    assert timed is not None
    assert [samples for samples, _ in timed.points] == [2, 4]


def test_host_time_is_measured_with_a_few_samples_and_zero_weights():
    found = host_seconds(words, CPU, None, score, channels_last=False)
    assert found is not None
    assert 0 < found < 10


def test_a_model_that_cannot_run_with_zeros_has_no_host_time():
    def build():
        model = nn.Linear(4, 4)
        model.register_forward_pre_hook(lambda module, _: 1 / module.weight.abs().sum().item())
        return model, torch.randn(2, 4)

    assert host_seconds(build, CPU, None, None, channels_last=False) is None


def test_timing_changes_nothing_else_in_the_profile():
    profile = trace_model(images, precision="fp32", target="cpu")
    timed = time_model(profile, images, parse_cluster_spec("cpu:1"), CPU, 4, FP32)
    assert timed.method == f"{profile.method}; operations timed on this device"
    assert replace(timed, measured_time=None, method=profile.method) == profile
