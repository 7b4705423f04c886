"""Emulated CUDA on the CPU: autocast, dropout, workspace of kernels; and the memory timeline of a step."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, linear, scaled_dot_product_attention, softmax

from samestep.nn import linear_cross_entropy
from samestep.planner.cuda_emulation import emulate_cuda
from samestep.planner.model_profile import MemoryPoint, PeakMemory
from samestep.planner.step_recorder import MemorySample, MemoryTracker, cuda_workspace, fit_peak_memory
from samestep.planner.trace import trace_model
from samestep.planner.traced_model import RealIntegers
from samestep.torch_private import (
    OtherKernels,
    cannot_be_traced,
    has_kernel,
    has_no_memory,
    with_memory,
    without_memory,
)

HALF = torch.float16


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path_factory, monkeypatch):
    # torch sets this permanently when it first imports its compiler
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def under_autocast(function):
    with without_memory(), torch.autocast("cpu", dtype=HALF):
        return function(torch.zeros(4, 8, dtype=HALF)).dtype


CASES = {
    "layer_norm": lambda x: layer_norm(x, (8,)),
    "softmax": lambda x: softmax(x, -1),
    "sum": torch.sum,
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "group_norm": lambda x: torch.group_norm(x[None], 4),
    "cross_entropy": lambda x: cross_entropy(x, torch.zeros(4, dtype=torch.long), reduction="none"),
}


@pytest.mark.parametrize("name", CASES)
def test_autocast_computes_the_same_operators_in_fp32_as_on_cuda(name):
    """The dtypes are those that autocast uses on a GPU."""
    before = under_autocast(CASES[name])
    with emulate_cuda():
        assert under_autocast(CASES[name]) == torch.float32
        assert under_autocast(lambda x: linear(x.float(), torch.zeros(3, 8))) == HALF
        assert under_autocast(lambda x: torch.cat([x, x])) == HALF
    assert under_autocast(CASES[name]) == before  # torch's own kernels are back


def test_a_requested_dtype_is_kept():
    with emulate_cuda():
        assert under_autocast(lambda x: softmax(x, -1, dtype=HALF)) == HALF


def bytes_per_sample(build, target):
    """Additional bytes per sample."""
    return trace_model(build, optimizer="SGD", precision="fp32", target=target).activations.per_sample


def test_dropout_saves_nothing_on_cuda_and_four_bytes_per_element_on_the_cpu():
    def build(p):
        def loss(model, batch):
            return (nn.functional.dropout(model(batch), p) * 1.0).sum()

        return nn.Linear(1, 4096, bias=False), torch.zeros(4, 1), loss

    on_cuda, on_cpu = (bytes_per_sample(lambda: build(0.5), target) for target in ("cuda", "cpu"))
    assert on_cpu - on_cuda == 4 * 4096 - 4  # on CUDA the next batch counts too


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_saves_its_weights_on_cuda_only_for_keyed_dropout(dropout):
    length = 256

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    needed = bytes_per_sample(lambda: (Attention(), torch.zeros(4, length, 8)), "cuda")
    assert (needed < 4 * length * length) == (dropout == 0.0)


class SharedHeads(nn.Module):
    """Four heads of queries, two of keys and values, and dropout or not."""

    def __init__(self, dropout, shared):
        super().__init__()
        self.qkv, self.dropout, self.heads = nn.Linear(8, 96), dropout, 2 if shared else 4

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 12, 8).transpose(1, 2).split((4, 4, 4), 1)
        k, v = k[:, : self.heads], v[:, : self.heads]
        return scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, enable_gqa=True)


@pytest.mark.parametrize(
    ("precision", "dropout", "shared", "kept"),
    [
        ("fp32", 0.0, False, 0),
        ("fp32", 0.0, True, 4),  # CUDA's kernel for fp32 has no shared heads
        ("bf16", 0.0, True, 0),
        ("bf16", 0.2, False, 4 + 2),  # the softmax in fp32, and what is left of it after dropout in bf16
    ],
)
def test_attention_keeps_its_weights_as_a_gpu_does(precision, dropout, shared, kept):
    """Bytes per weight, of four heads; measured on an H200 for Mixtral and T5."""
    length = 512
    profile = trace_model(lambda: (SharedHeads(dropout, shared), torch.zeros(2, length, 8)), precision=precision)
    weights = profile.activations.per_sample / (4 * length * length)
    # in the backward pass two gradients of the weights exist as well, and the other tensors are small
    assert kept <= weights < (3 * kept + 1)


def test_attention_with_shared_heads_and_masks_runs_with_and_without_memory():
    q, k = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 2, 6, 8, requires_grad=True)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    expected = scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    with emulate_cuda():
        found = scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(found, expected)
        unbatched = scaled_dot_product_attention(q[0], q[0], q[0])
        with without_memory():
            bare = scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(unbatched, scaled_dot_product_attention(q[0], q[0], q[0]))
    assert bare.shape == expected.shape


@pytest.mark.parametrize(
    ("dtype", "channels_last", "kernel", "forward", "backward"),
    [
        (torch.bfloat16, True, 3, 0, 2),  # the gradient for the bias in fp32: twice the size
        (torch.bfloat16, False, 3, 2, 2),
        (torch.bfloat16, False, 1, 0, 0),
        (torch.float32, False, 3, 0, 4.6),
        (torch.float32, True, 3, 2, 6.6),
        (torch.float32, False, 1, 0, 2),
    ],
)
def test_the_workspace_of_convolutions_matches_measurements_on_a_gpu(dtype, channels_last, kernel, forward, backward):
    """In units of the image, which is as large as the result; the size of the weights is negligible."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with without_memory():
        image = torch.zeros(8, 64, 128, 128, dtype=dtype).contiguous(memory_format=layout)
        weight, bias = torch.zeros(64, 64, kernel, kernel, dtype=dtype), torch.zeros(64, dtype=dtype)
        size = image.numel() * image.element_size()
        assert cuda_workspace("aten.convolution", [image, weight, bias], [image]) / size == pytest.approx(
            forward, abs=0.01
        )
        gradients = [image, weight, bias]
        found = cuda_workspace("aten.convolution_backward", [image, image, weight], gradients)
        assert found / size == pytest.approx(backward, abs=0.01)
    assert cuda_workspace("aten.mm", [image, weight], [image]) == 0


class ChunkedLosses(nn.Module):
    """A language model whose head computes its losses in chunks of 8 tokens."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 48, bias=False)

    def forward(self, hidden, labels):
        return linear_cross_entropy(self.layer(hidden), self.head.weight, labels, chunk=8).mean(1)


def products_of_chunked_losses(precision, target):
    def build():
        return ChunkedLosses(), (torch.randn(4, 8, 16), torch.zeros(4, 8, dtype=torch.long)), lambda m, b: m(*b)

    profile = trace_model(build, precision=precision, target=target)
    flops = Counter()
    for op in profile.ops:
        flops[op.dtype] += op.flops / profile.traced_samples
    return {dtype: count for dtype, count in flops.items() if count}


@pytest.mark.parametrize(
    ("precision", "target", "dtype"),
    [("bf16", "cuda", "bfloat16"), ("fp32", "cuda", "float32"), ("fp32", "cpu", "float32")],
)
def test_the_products_of_a_chunked_loss_have_the_dtype_of_their_factors_on_a_gpu(precision, target, dtype):
    layer, head = 2 * 8 * 16 * 16, 2 * 8 * 16 * 48
    # the layer needs no gradient of its input; the head computes its logits twice
    assert products_of_chunked_losses(precision, target) == {dtype: 2 * layer + 4 * head}


def test_group_norm_saves_contiguous_images_on_cuda():
    image = torch.randn(2, 8, 4, 4, requires_grad=True)
    turned = image.contiguous(memory_format=torch.channels_last)
    expected = torch.group_norm(turned, 4)
    assert expected.is_contiguous(memory_format=torch.channels_last)
    with emulate_cuda():
        found = torch.group_norm(turned, 4)
        found.sum().backward()
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_images_are_copied_if_the_weights_are_channels_last():
    with without_memory():
        image = torch.zeros(8, 64, 128, 128, dtype=torch.bfloat16)
        weight = torch.zeros(64, 64, 3, 3, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    assert cuda_workspace("aten.convolution", [image, weight], [image]) == image.numel() * 2


def test_a_storage_counts_until_its_last_tensor_is_freed():
    tracker = MemoryTracker(cuda=False)
    with tracker:
        first = torch.zeros(100)
        view = first[10:].view(9, 10).t()
        assert tracker.used == 400
        del first
        assert tracker.used == 400
        copy = view.contiguous()
        assert tracker.used == 400 + 360
        del view
        assert tracker.used == 360
        copy.add_(1)
    del copy
    assert tracker.used == 0
    assert [sample.used for sample in tracker.timeline] == [400, 760]


def test_only_cuda_kernels_need_a_workspace():
    image = torch.zeros(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(8, 8, 3, 3)
    peaks = {}
    for cuda in (False, True):
        with MemoryTracker(cuda=cuda) as tracker:
            result = torch.conv2d(image, weight, padding=1)
        peaks[cuda] = max(sample.exact for sample in tracker.timeline)
    assert peaks == {False: result.nbytes, True: 2 * result.nbytes + image.nbytes}


def test_sparse_gradients_are_not_as_large_as_their_parameter():
    def build():
        return nn.Embedding(1000, 8, sparse=True), torch.zeros(4, 2, dtype=torch.long)

    profile = trace_model(build, optimizer="SGD", precision="fp32")
    assert (profile.weights, profile.gradients) == (4 * 8000, 0)


lines = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50), st.integers(0, 400)), min_size=1, max_size=30)


@given(lines, st.integers(1, 5000), st.sampled_from([1, 2, 3, 4, 8, 16, 64, 1024]))
def test_the_fitted_peak_is_the_maximum_of_all_points(points, samples, shards):
    sizes, total = (4, 8), 400
    timelines = [[MemorySample("op", used := f + p * size + g, used, g) for f, p, g in points] for size in sizes]
    peak = fit_peak_memory(*timelines, sizes, 0, total, MemoryPoint(0, 0, 0))
    peak_bytes = max(f + p * samples + g // shards for f, p, g in points)
    assert peak.at(samples, shards) == pytest.approx(peak_bytes - total // shards, abs=1)
    assert peak.at_with_all_gradients(samples) == max(f + p * samples for f, p, _ in points)


def test_only_peaks_are_fitted_if_operations_depend_on_the_micro_batch():
    small = [MemorySample("a", 100, 100, 0)]
    large = [MemorySample("a", 150, 150, 0), MemorySample("b", 200, 200, 10)]
    assert fit_peak_memory(small, large, (4, 8), 0, 10, MemoryPoint(7, 1, 0)) == PeakMemory(
        (MemoryPoint(200 - 10 - 25 * 8 + 7, 26, 10),), 10
    )


def test_integers_have_values_while_floats_have_no_memory():
    with without_memory(), RealIntegers():
        ids = torch.arange(6).view(2, 3)
        assert not has_no_memory(ids)
        assert ids.sum().item() == 15
        ids += 1
        assert ids.nonzero().shape == (6, 2)
        assert has_no_memory(ids.float())
        with pytest.raises(Exception, match="_local_scalar_dense") as caught:
            ids.float().sum().item()
        assert cannot_be_traced(caught.value)
        with with_memory():
            assert torch.ones(3).sum().item() == 3


def test_replaced_kernels_are_removed_when_they_are_closed():
    kernels = OtherKernels()
    kernels.put("dropout", lambda inputs, p, train: inputs + 7, "AutogradCPU")
    assert torch.dropout(torch.zeros(1), 0.0, True).item() == 7
    kernels.close()
    assert torch.dropout(torch.zeros(1), 0.0, True).item() == 0
    assert has_kernel("layer_norm", "AutocastCUDA")
    assert not has_kernel("layer_norm", "AutocastCPU")
