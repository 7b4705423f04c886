"""Recurrent layers and grouped products as a trace for CUDA sees them: bytes and FLOPs calculated by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from samestep.planner.cuda_emulation import emulate_cuda
from samestep.planner.cudnn_rnn import RecurrentLayers
from samestep.planner.step_recorder import MemoryTracker, OpCounter
from samestep.planner.step_timing import replay
from samestep.planner.trace import trace_calls, trace_model
from samestep.planner.traced_model import RealIntegers
from samestep.torch_private import has_no_memory, without_memory

TIME, ROWS, INPUT, HIDDEN = 10, 4, 8, 16


@pytest.fixture(autouse=True)
def _torch_cache_elsewhere(tmp_path_factory, monkeypatch):
    # torch sets this permanently when it first imports its compiler
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def test_the_reserve_space_has_the_size_that_cudnn_has_reported():
    """For 25,000 time steps of all samples in fp32: https://github.com/pytorch/pytorch/issues/2895."""
    sizes = {
        kind: 4 * RecurrentLayers(kind, 4, 1, 320, 320, True, False, False).reserve(25_000) for kind in ("lstm", "gru")
    }
    assert sizes == {"lstm": 736_000_000, "gru": 864_000_000}


# Bytes of reserve space and workspace that torch allocated on an H200 with cuDNN 9.19, torch 2.11.
# kind, layers, directions, input, hidden, output, samples, time steps of all samples, bytes per number, packed
MEASURED = {
    ("lstm", 1, 1, 256, 512, 512, 256, 51200, 4, False): (524288256, 596642048),
    ("lstm", 3, 1, 256, 512, 512, 256, 51200, 4, False): (1782579456, 640682240),
    ("lstm", 3, 1, 256, 512, 512, 256, 51200, 2, False): (891289856, 332925184),
    ("lstm", 3, 1, 512, 512, 512, 128, 12800, 4, False): (445645056, 215483648),
    ("lstm", 3, 1, 1024, 256, 256, 128, 12800, 4, False): (222822656, 224265472),
    ("lstm", 4, 2, 80, 1024, 1024, 32, 9600, 4, False): (1808793856, 971432448),
    ("lstm", 3, 2, 256, 512, 512, 256, 51200, 2, False): (1782579456, 860883200),
    ("lstm", 2, 1, 100, 300, 300, 64, 3200, 4, False): (42240256, 43593984),
    ("lstm", 3, 1, 256, 512, 128, 256, 25600, 4, False): (1087897856, 348129536),
    ("lstm", 3, 2, 256, 512, 128, 256, 25600, 4, False): (2175795456, 890243328),
    ("lstm", 3, 1, 256, 512, 512, 256, 19282, 4, True): (671322368, 215630080),
    ("lstm", 3, 2, 256, 512, 512, 256, 18973, 4, True): (1321128192, 604692736),
    ("gru", 1, 1, 256, 512, 512, 256, 51200, 4, False): (629145856, 540018944),
    ("gru", 3, 1, 256, 512, 512, 256, 51200, 2, False): (1048576256, 273680640),
    ("gru", 2, 2, 512, 512, 512, 128, 12800, 4, False): (681574656, 439354624),
    ("gru", 1, 1, 1024, 256, 256, 128, 12800, 4, False): (78643456, 209585408),
    ("gru", 3, 2, 256, 512, 512, 256, 19015, 4, True): (1557709056, 502673664),
    ("rnn_tanh", 3, 1, 512, 512, 512, 128, 12800, 4, False): (131072256, 170132736),
}


@pytest.mark.parametrize("case", MEASURED)
def test_reserve_space_and_workspace_are_those_of_cudnn(case):
    kind, layers, directions, inputs, hidden, output, samples, rows, itemsize, packed = case
    shape = RecurrentLayers(kind, layers, directions, hidden, output, True, False, False, packed)
    module = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[kind]
    options = {"proj_size": output} if output != hidden else {}
    layer = module(inputs, hidden, layers, bidirectional=directions == 2, device="meta", **options)
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    reserve, workspace = MEASURED[case]
    assert shape.reserve(rows) * itemsize == pytest.approx(reserve, abs=1024)
    found = shape.workspace(rows, samples, inputs, weights, itemsize)
    assert abs(found - workspace) < {"rnn_tanh": 0.12}.get(kind, 0.02) * (reserve + workspace)


def kept_bytes(layer, data, dtype=None):
    """Bytes that a call keeps until its backward pass, with the states that it returns."""
    with emulate_cuda(), without_memory(), RealIntegers():
        layer, inputs = layer(), data()
        tracker = MemoryTracker(cuda=False)
        for tensor in (*layer.parameters(), *(inputs if isinstance(inputs, tuple) else (inputs,))):
            if isinstance(tensor, torch.Tensor):
                tracker.add(tensor)
        before = tracker.used
        with tracker, torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = layer(inputs)
        assert outputs
        return tracker.used - before


def sequences():
    return torch.zeros(TIME, ROWS, INPUT)


# Output, reserve space, states at the start and at the end; 40 time steps of all samples, 4 bytes per number.
BY_HAND = {
    "LSTM": (lambda: nn.LSTM(INPUT, HIDDEN), 4 * (40 * 16 + 40 * 5 * 16 + 4 * 64)),
    "LSTM of two layers": (lambda: nn.LSTM(INPUT, HIDDEN, 2), 4 * (40 * 16 + 40 * (5 * 16 * 2 + 16) + 4 * 2 * 64)),
    "bidirectional LSTM of three layers": (
        lambda: nn.LSTM(INPUT, HIDDEN, 3, bidirectional=True),
        4 * (40 * 32 + 40 * 2 * (5 * 16 * 3 + 16 * 2) + 4 * 6 * 64),
    ),
    "LSTM with a projection": (
        lambda: nn.LSTM(INPUT, HIDDEN, 2, proj_size=4),
        4 * (40 * 4 + 40 * ((6 * 16 + 4) * 2 + 16) + 2 * 2 * (64 + 16)),
    ),
    "GRU": (lambda: nn.GRU(INPUT, HIDDEN), 4 * (40 * 16 + 40 * 6 * 16 + 2 * 64)),
    "RNN": (lambda: nn.RNN(INPUT, HIDDEN), 4 * (40 * 16 + 40 * 16 + 2 * 64)),
    "RNN with ReLU": (lambda: nn.RNN(INPUT, HIDDEN, nonlinearity="relu"), 4 * (40 * 16 + 40 * 16 + 2 * 64)),
    "LSTM in evaluation mode": (lambda: nn.LSTM(INPUT, HIDDEN).eval(), 4 * (40 * 16 + 4 * 64)),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_layer_keeps_its_output_its_states_and_the_reserve_space(name, batch_first):
    make, expected = BY_HAND[name]

    def layer():
        made = make()
        made.batch_first = batch_first
        return made

    assert kept_bytes(layer, lambda: sequences().transpose(0, 1) if batch_first else sequences()) == expected


def test_under_autocast_a_recurrent_layer_computes_in_fp16_with_copies_of_input_states_and_weights():
    weights = 4 * 16 * (8 + 16) + 2 * 4 * 16
    numbers = 40 * 8 + weights + 40 * 16 + 40 * 5 * 16 + 4 * 64
    for dtype in (torch.bfloat16, torch.float16):
        assert kept_bytes(lambda: nn.LSTM(INPUT, HIDDEN), sequences, dtype) == 2 * numbers


def test_dropout_between_layers_makes_a_call_per_layer_that_copies_its_weights():
    """samestep drops by sample between the layers, so that cuDNN gets one layer at a time."""
    first = 40 * 16 + 40 * 5 * 16 + (4 * 16 * (8 + 16) + 128)
    second = 40 * 16 + 40 * 5 * 16 + (4 * 16 * (16 + 16) + 128)
    states, dropped = 4 * 2 * 64, 40 * 16
    assert kept_bytes(lambda: nn.LSTM(INPUT, HIDDEN, 2, dropout=0.5), sequences) == 4 * (
        first + dropped + second + states
    )


def test_a_packed_sequence_counts_its_real_time_steps():
    """The lengths 10, 7, 5 and 2 have 24 time steps."""

    def packed():
        with torch.no_grad():
            return pack_padded_sequence(sequences(), torch.tensor([10, 7, 5, 2]))

    assert kept_bytes(lambda: nn.LSTM(INPUT, HIDDEN), packed) == 4 * (24 * 16 + 24 * 5 * 16 + 4 * 64)


class Packed(nn.Module):
    """Reads only the real time steps of each sample."""

    def __init__(self, sort):
        super().__init__()
        self.lstm, self.sort = nn.LSTM(INPUT, HIDDEN, batch_first=True), sort

    def forward(self, x, lengths):
        lengths = lengths.cpu()
        packed, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=not self.sort))
        return pad_packed_sequence(packed, batch_first=True)[0]


@pytest.mark.parametrize("sort", [False, True])
def test_a_model_with_packed_sequences_is_traced_with_the_lengths_of_the_example(sort):
    def profile(*lengths):
        batch = torch.zeros(4, TIME, INPUT), torch.tensor(lengths)
        return trace_model(lambda: (Packed(sort), batch), optimizer="SGD", precision="fp32")

    full, half = profile(10, 10, 10, 10), profile(10, 4, 4, 2)
    assert full.method == half.method == "traced without memory"
    assert half.forward_flops == full.forward_flops / 2
    assert half.activations.per_sample < 0.75 * full.activations.per_sample  # inputs and outputs are padded
    batch = torch.randn(4, TIME, INPUT), torch.tensor([10, 4, 4, 2])
    assert Packed(sort)(*batch).shape == (4, TIME, HIDDEN)


class Last(nn.Module):
    """The output of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_step_multiplies_input_and_state_with_every_gate_three_times(kind, gates):
    profile = trace_model(
        lambda: (Last(kind(INPUT, HIDDEN, 2, batch_first=True)), torch.zeros(4, TIME, INPUT)), precision="fp32"
    )
    products = gates * HIDDEN * ((INPUT + HIDDEN) + (HIDDEN + HIDDEN))
    assert profile.step_flops == 3 * 2 * products * TIME
    assert profile.forward_flops == 2 * products * TIME


def test_the_peak_of_a_step_of_an_lstm_by_hand():
    """The peak is in the backward pass, when the gradients of output, states and input exist."""
    profile = trace_model(
        lambda: (Last(nn.LSTM(INPUT, HIDDEN, batch_first=True)), torch.zeros(4, TIME, INPUT)),
        optimizer="SGD",
        precision="fp32",
    )
    data, output, reserve, states = TIME * INPUT, TIME * HIDDEN, TIME * 5 * HIDDEN, 2 * HIDDEN
    kept = data + output + reserve + states
    backward = output + states + data + states  # gradients of output, last states, input and first states
    workspace = TIME * (5 * HIDDEN + INPUT) + 10 * HIDDEN
    batch = data  # the next one
    expected = 4 * (kept + backward + workspace + batch)
    assert profile.activations.per_sample == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "dropout": 0.5}])
@pytest.mark.parametrize("packed", [False, True])
def test_with_values_recurrent_layers_compute_the_same_as_before(kind, options, packed):
    torch.manual_seed(0)
    layer, data = kind(INPUT, HIDDEN, **options).train(not options.get("dropout")), torch.randn(TIME, ROWS, INPUT)
    inputs = pack_padded_sequence(data, torch.tensor([10, 7, 5, 2])) if packed else data
    expected = layer(inputs)[0]
    with emulate_cuda():
        found = layer(inputs)[0]
    torch.testing.assert_close(*(each.data if packed else each for each in (found, expected)))


GROUPED = {  # sizes of both factors, number of groups, size and FLOPs of the result
    "rows times experts": ((12, 16), (3, 16, 24), 3, (12, 24), 2 * 12 * 16 * 24),
    "batches": ((3, 8, 16), (3, 16, 24), None, (3, 8, 24), 2 * 3 * 8 * 16 * 24),
    "groups of columns": ((3, 8, 16), (16, 24), 3, (8, 24), 2 * 8 * 16 * 24),
    "gradients of experts": ((16, 48), (48, 24), 3, (3, 16, 24), 2 * 16 * 48 * 24),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_grouped_product_has_the_shape_and_the_flops_of_its_groups(name, dtype):
    first, second, groups, size, flops = GROUPED[name]
    with emulate_cuda(), without_memory(), RealIntegers():
        total = size[-1] if len(first) == 3 else first[-1] if len(second) == 2 else first[0]
        ends = None if groups is None else torch.arange(1, groups + 1, dtype=torch.int32) * total // groups
        counter = OpCounter()
        with MemoryTracker(cuda=True, counter=counter):
            found = grouped_mm(torch.zeros(first, dtype=dtype), torch.zeros(second, dtype=dtype), offs=ends)
    real = grouped_mm(torch.zeros(first), torch.zeros(second), offs=ends)
    assert found.shape == real.shape == size
    assert found.stride() == real.stride()
    assert found.dtype == dtype
    assert counter.flops == flops


def test_rows_of_a_grouped_product_begin_at_multiples_of_16_bytes():
    with emulate_cuda(), without_memory(), RealIntegers():
        ends = torch.tensor([5, 12], dtype=torch.int32)
        found = grouped_mm(torch.zeros(12, 16), torch.zeros(2, 16, 21), offs=ends)
        assert found.shape == (12, 21)
        assert found.stride() == (24, 1)


class Experts(nn.Module):
    """A mixture of experts: each row goes to the expert with the highest score."""

    def __init__(self, experts=4):
        super().__init__()
        self.gate, self.experts = nn.Linear(INPUT, experts), nn.Parameter(torch.randn(experts, INPUT, HIDDEN))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen, order = torch.sort(scores.argmax(1))
        counts = torch.histc(chosen.float(), bins=len(self.experts), min=0, max=len(self.experts) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        return grouped_mm(x[order].to(self.experts.dtype), self.experts, offs=ends) * scores[order].amax(1)[:, None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_experts_is_traced_in_every_precision(precision):
    """torch computes the shape of a grouped product for bf16 only, and weights are fp32."""
    profile = trace_model(lambda: (Experts(), torch.zeros(8, INPUT)), precision=precision)
    assert profile.method == "traced without memory"
    grouped = [op for op in profile.ops if op.name == "aten._grouped_mm"]
    assert sum(op.flops for op in grouped) == 2 * 2 * 16 * INPUT * HIDDEN  # forward, and the gradient of the experts


def test_a_grouped_product_runs_alone_with_groups_of_the_same_size():
    (work,) = trace_calls(lambda: (Experts(), torch.zeros(8, INPUT)), [4], precision="fp32")
    calls = [call for call in work.calls if call.func.overloadpacket is torch.ops.aten._grouped_mm]
    assert calls
    assert replay(calls, torch.device("cpu")).keys() == set(calls)


def test_a_single_random_number_is_the_largest_one():
    with without_memory(), RealIntegers():
        for draw in (torch.rand([]), torch.rand(1), torch.rand((1, 1))):
            assert draw.item() == 1 - 2.0**-24
            assert draw < 1
        assert not torch.rand([]) < 0.5
        assert has_no_memory(torch.rand(3))
        assert has_no_memory(torch.rand([]) * torch.zeros(3))


def test_single_numbers_that_follow_from_integers_have_values_and_others_do_not():
    with without_memory(), RealIntegers():
        tokens = torch.arange(6)
        share = (tokens > 1).sum() / tokens.numel()
        assert float(share * 2 + 0.5) == pytest.approx(2 * 4 / 6 + 0.5)
        assert has_no_memory(tokens.float())
        assert has_no_memory(tokens.float().mean())
        weight = torch.ones(1, requires_grad=True)
        assert has_no_memory(weight * share)


class LayerDrop(nn.Module):
    """Skips layers at random in training, as wav2vec2 does."""

    def __init__(self, probability):
        super().__init__()
        self.layers, self.probability = nn.ModuleList(nn.Linear(INPUT, INPUT) for _ in range(6)), probability

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = layer(x).tanh()
        return x


def test_a_trace_skips_no_layer():
    with_drop, without = (
        trace_model(lambda: (LayerDrop(probability), torch.zeros(4, INPUT)), precision="fp32")  # noqa: B023
        for probability in (0.9, 0.0)
    )
    assert with_drop.method == "traced without memory"
    assert with_drop.step_flops == without.step_flops > 0
    assert with_drop.activations == without.activations
