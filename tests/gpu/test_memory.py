"""Predicted and actual memory on a GPU, for different workloads."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from samestep import Run
from samestep.errors import PlanError
from samestep.planner.model_profile import CUDA_MARGIN
from samestep.planner.trace import trace_model

STEPS = 4


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Six blocks over sequences of vectors."""

    def __init__(self, width=512):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(6)), nn.Linear(width, 1000)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def transformer(samples):
    return Transformer(), (torch.randn(samples, 512, 512), torch.zeros(samples, dtype=torch.long))


def convolutions(samples):
    sizes = [(3, 64), (64, 128), (128, 128), (128, 128)]
    layers = [m for a, b in sizes for m in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000))
    return model, (torch.randn(samples, 3, 112, 112), torch.zeros(samples, dtype=torch.long))


class Recurrent(nn.Module):
    """A stacked LSTM, of which the mean of all outputs is classified."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(256, 512, 3, batch_first=True), nn.Linear(512, 1000)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


def recurrent(samples):
    return Recurrent(), (torch.randn(samples, 200, 256), torch.zeros(samples, dtype=torch.long))


def sounds(samples):
    sizes = [(1, 128, 10, 5), (128, 128, 3, 2), (128, 128, 3, 2)]
    layers = [m for a, b, kernel, stride in sizes for m in (nn.Conv1d(a, b, kernel, stride), nn.GELU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 1000))
    return model, (torch.randn(samples, 1, 40000), torch.zeros(samples, dtype=torch.long))


def wide(samples):
    layers = [m for _ in range(4) for m in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(4096, 1000)), (
        torch.randn(samples, 4096),
        torch.zeros(samples, dtype=torch.long),
    )


class Rows(torch.utils.data.Dataset):
    """Repeats one sample."""

    def __init__(self, batch, count):
        self.row, self.count = tuple(tensor[0] for tensor in batch), count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.row


def measured_peak(make, samples, precision, optimizer, checkpoint, channels_last):
    """Peak memory of the steps after the first two, without what other tests left allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with Run(global_batch=samples, precision=precision) as run:
        model, batch = make(2)
        model = run.wrap(model, activation_checkpointing=checkpoint, channels_last=channels_last)
        stepper = optimizer(model.parameters())
        for epoch in run.shard(Rows(batch, samples * STEPS), micro_batch=samples, num_workers=0).epochs(1):
            for step in epoch:
                if step.number == 2:
                    torch.cuda.reset_peak_memory_stats()
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                stepper.step()
                stepper.zero_grad()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("make", "samples", "precision", "optimizer", "checkpoint", "channels_last"),
    [
        (transformer, 64, "bf16", torch.optim.AdamW, (), False),
        (transformer, 128, "bf16", torch.optim.AdamW, (Block,), False),
        (convolutions, 64, "bf16", torch.optim.SGD, (), True),
        (wide, 256, "fp32", torch.optim.AdamW, (), False),
        (recurrent, 256, "fp32", torch.optim.AdamW, (), False),
        (recurrent, 256, "bf16", torch.optim.AdamW, (), False),
        (sounds, 64, "bf16", torch.optim.AdamW, (), False),
    ],
)
def test_a_trace_predicts_the_peak_memory_of_a_run(make, samples, precision, optimizer, checkpoint, channels_last):
    torch._C._cuda_clearCublasWorkspaces()
    profile = trace_model(
        lambda: make(4), optimizer=optimizer, precision=precision, blocks=checkpoint, channels_last=channels_last
    )
    working = profile.checkpointed_activations if checkpoint else profile.activations
    assert working is not None
    predicted = profile.persistent + working.at(samples)
    real = measured_peak(make, samples, precision, optimizer, checkpoint, channels_last)
    assert predicted == pytest.approx(real, rel=CUDA_MARGIN)


def test_a_trace_needs_no_gpu_memory():
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trace_model(lambda: transformer(64), precision="bf16")
    assert torch.cuda.max_memory_allocated() == before


def test_a_model_built_on_the_gpu_raises():
    def build():
        model, batch = wide(2)
        model.register_buffer("count", torch.zeros(3, dtype=torch.long, device="cuda"))
        return model, batch

    with pytest.raises(PlanError, match=r"puts 'count' on cuda:0\. Build the model and its batch without a device"):
        trace_model(build)
