"""Keyed draws on a GPU: the kernel computes the masks of the CPU, also if a layer is computed again."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.data.sample_rng import keep_mask
from samestep.parallel.keyed_dropout import dropout

KEYS = torch.tensor([3, -5, 1 << 40, 77])


@pytest.mark.parametrize("shape", [(7,), (64,), (5, 9), (33, 128), (3, 5, 10), (2, 17, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_computes_the_mask_of_the_cpu(shape, dtype):
    inputs = torch.randn(4, *shape, device="cuda", dtype=dtype, requires_grad=True)
    outputs = dropout(inputs, KEYS.cuda(), 9, 0.3)
    outputs.backward(torch.ones_like(outputs))
    mask = keep_mask(KEYS, shape, 9, 0.3)
    assert torch.equal(outputs.detach().cpu() != 0, mask & (inputs.detach().cpu() != 0))
    assert torch.equal(inputs.grad.cpu() != 0, mask)
    torch.testing.assert_close(inputs.grad.cpu(), (mask / 0.7).to(dtype))
    torch.testing.assert_close(outputs, dropout(inputs.double(), KEYS.cuda(), 9, 0.3).to(dtype))


class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 32), nn.Linear(32, 1), nn.Dropout(0.3)
        self.attention = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True)
        self.rnn = nn.GRU(32, 32, 2, dropout=0.3)
        self.checkpointed = checkpointed

    def hidden(self, x):
        return self.drop(functional.gelu(self.first(x)))

    def forward(self, x):
        x = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)
        x = self.attention(x.unsqueeze(1).repeat(1, 4, 1))
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape[0], 1, 1, device=x.device)
        x, _ = self.rnn(x.transpose(0, 1))
        return self.last(functional.dropout(x[-1], 0.1, self.training)).sum(-1)


def train(folder, checkpointed=False, micro_batch=None, compile=False, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(29, 6, generator=rng, dtype=dtype)
    with Run(global_batch=10, seed=3, folder=folder, compile=compile, precision="fp32") as run:
        net = Net(checkpointed).to(dtype)
        model = run.wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in run.shard(TensorDataset(inputs, inputs.sum(1)), shuffle=True, micro_batch=micro_batch).epochs(2):
            for step in epoch:
                for x, y in step:
                    step.mean((model(x) - y) ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_micro_batches_and_checkpointing_change_nothing(tmp_path: Path, dtype, limit):
    one = train(tmp_path / "one", dtype=dtype)
    for number, changes in enumerate(
        ({"micro_batch": 3}, {"micro_batch": 1}, {"checkpointed": True, "micro_batch": 4})
    ):
        assert (train(tmp_path / str(number), dtype=dtype, **changes) - one).abs().max() < limit


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_draws_by_sample_too(tmp_path: Path):
    one = train(tmp_path / "one", compile=True)
    assert (train(tmp_path / "two", micro_batch=4, compile=True) - one).abs().max() < 1e-10
