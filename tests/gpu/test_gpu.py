"""The same step on a GPU: parity, precision, prefetched batches, fused optimizers, the loss scale, compiling."""

import gc
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset, TensorDataset

from samestep import Run
from tests import warm

WIDTH, CLASSES, LENGTH = 32, 5, 6
DEVICE = torch.device("cuda")


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        drop = [nn.Dropout(dropout)] if dropout else []
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), *drop, nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A small transformer over sequences of vectors."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(dropout) for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def data(n=50):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    return TensorDataset(torch.randn(n, LENGTH, WIDTH, generator=generator), labels)


def train(precision="auto", epochs=2, compile=False, factor=1.0, make=torch.optim.AdamW, **wrap):
    """Train on the GPU of this rank; return weights, losses, gradient norms and the choices of the run."""
    warnings.filterwarnings("ignore", ".*ranks share 1 GPU.*")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # fp32 was requested explicitly
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    with Run(global_batch=12, seed=0, precision=precision, compile=compile) as run:
        torch.manual_seed(5)
        net = Net()
        model = run.wrap(net, **wrap)
        optimizer = make(model.parameters(), lr=1e-3)
        losses, norms = [], []
        for epoch in run.shard(data(), shuffle=True, micro_batch=4, num_workers=0).epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    assert inputs.device.type == "cuda"
                    sample_losses = cross_entropy(model(inputs), labels, reduction="none")
                    expected = torch.float64 if precision == "fp64" else torch.float32
                    assert sample_losses.dtype == expected  # whatever the dtype of the model
                    step.mean(factor * sample_losses).backward()
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(run.mean(step.loss))
        return {
            "weights": {name: value.detach().cpu() for name, value in net.named_parameters()},
            "losses": losses,
            "norms": norms,
            "choices": run._lifecycle.context.acceleration.choices(),
            "fused": [group.get("fused") for group in optimizer.param_groups],
            "counts": {state["step"].device.type for state in optimizer.state.values() if "step" in state},
            "backend": run._comm.backend,
        }


def max_difference(a, b):
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_on_one_gpu_train_the_same_in_fp32_as_one(ranks, size, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    single = ranks(1, train, "fp32", timeout=100)[0]
    for result in ranks(size, train, "fp32", timeout=100):
        assert result["backend"] == "gloo"
        assert max_difference(result["weights"], single["weights"]) < 2e-6
        assert result["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(single["norms"], abs=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_on_one_gpu_train_the_same_in_bf16_as_one_within_rounding(ranks, size):
    single = ranks(1, train, "bf16", timeout=100)[0]
    for result in ranks(size, train, "bf16", timeout=100):
        assert result["losses"] == pytest.approx(single["losses"], abs=0.01)
        # if a gradient is nearly zero, rounding decides its sign, and Adam makes a full step
        differences = [
            float((result["weights"][name] - value).abs().mean()) for name, value in single["weights"].items()
        ]
        assert max(differences) < 5e-4


def test_fp64_trains_the_same_on_several_ranks_as_on_one(ranks):
    single = ranks(1, train, "fp64", timeout=100)[0]
    for result in ranks(2, train, "fp64", timeout=100):
        assert result["losses"] == pytest.approx(single["losses"], rel=1e-9)
        assert {value.dtype for value in result["weights"].values()} == {torch.float64}


def train_in_an_nccl_group():
    os.environ.update(
        warm.torchrun_variables(0, 2, 1, warm.free_port()), RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1"
    )
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    try:
        result = train("fp32")
        total = torch.ones(3, device="cuda")
        dist.all_reduce(total)
        return result, total.tolist()
    finally:
        dist.destroy_process_group()


def test_a_run_uses_an_existing_nccl_group_and_leaves_it_open(ranks):
    result, total = ranks(1, train_in_an_nccl_group, timeout=100)[0]
    assert total == [1, 1, 1]
    assert max_difference(result["weights"], ranks(1, train, "fp32", timeout=100)[0]["weights"]) == 0


def test_auto_chooses_and_logs_bf16_with_tf32_and_a_fused_optimizer(capsys):
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with Run(global_batch=4):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    capsys.readouterr()
    result = train()
    assert result["choices"]["precision"] == "bf16"
    assert result["choices"]["tf32"] is True
    assert result["choices"]["fused"] == ["AdamW"]
    assert (result["fused"], result["counts"]) == ([True], {"cuda"})
    output = capsys.readouterr().out
    assert output.count("precision: bf16 (auto: the GPU supports it), TF32 for fp32 products; torch.compile off;") == 1
    assert output.count("optimizer: fused AdamW, one kernel for all parameters (fused=False turns it off)") == 1


def test_explicit_fp32_does_not_use_tf32():
    big = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    exact = (big.double() @ big.double()).float()
    with Run(global_batch=4, precision="fp32"):
        strict = float(((big.cuda() @ big.cuda()).cpu() - exact).abs().max())
    with Run(global_batch=4):
        fast = float(((big.cuda() @ big.cuda()).cpu() - exact).abs().max())
    assert strict < 2e-4
    assert fast > 20 * strict


def test_the_summary_contains_the_choices():
    with Run(global_batch=10, folder="out") as run:
        model = run.wrap(nn.Linear(WIDTH, CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in run.shard(data()).epochs(1):
            for step in epoch:
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs.mean(1)), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["choices"]["fused"] == ["SGD"]
    assert summary["metrics"]["train/memory_bytes"] > 0


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True, "fused": False}]
)
def test_explicit_optimizer_options_are_kept(options):
    result = train(make=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, **options))
    assert result["fused"] == [options.get("fused")]
    assert result["choices"]["fused"] == []


def test_fused_and_default_train_the_same():
    fused = train("fp32")
    default = train("fp32", make=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=False))
    assert max_difference(fused["weights"], default["weights"]) < 1e-5


def test_a_restored_optimizer_is_fused_and_continues_from_its_state():
    def weights(change):
        torch.manual_seed(0)
        with Run(global_batch=50, seed=0, precision="fp32") as run:
            model = run.wrap(nn.Linear(WIDTH, CLASSES))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
            for epoch in run.shard(data()).epochs(6):
                if epoch.number == 3:
                    state = optimizer.state_dict()
                    if change:
                        state["param_groups"] = [{**group, "fused": None} for group in state["param_groups"]]
                        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                    optimizer.load_state_dict(state)
                for step in epoch:
                    for inputs, labels in step:
                        step.mean(cross_entropy(model(inputs.mean(1)), labels, reduction="none")).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return (
                model.weight.detach().clone(),
                optimizer.param_groups[0]["fused"],
                optimizer.state[model.weight]["step"],
            )

    kept, _, _ = weights(change=False)
    resumed, fused, count = weights(change=True)
    assert fused is True
    assert (count.device.type, float(count)) == ("cuda", 6.0)
    assert torch.allclose(kept, resumed, atol=1e-6)


class Rows(Dataset):
    """Item i is a large row whose every value is i."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((200_000,), float(index)), index


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_have_the_right_values(workers):
    with Run(global_batch=8, seed=0) as run:
        slow = torch.randn(4096, 4096, device=DEVICE)
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        rows = 0
        for epoch in run.shard(Rows(), shuffle=True, num_workers=workers).epochs(2):
            for step in epoch:
                for values, indices in step:
                    for _ in range(10):  # keep the GPU busy until after the next batch was requested
                        slow = torch.tanh(slow @ slow)
                    expected = torch.as_tensor(step._current.indices, device=DEVICE)
                    wrong += (values != expected[:, None]).sum() + (indices != expected).sum()
                    rows += len(indices)
                    del values, indices  # frees their memory for the next copy
        assert rows == 128
        assert int(wrong) == 0
    gc.collect()  # the workers end with their DataLoader


def test_an_overflow_in_fp16_drops_the_step_and_halves_the_scale(capsys):
    result = train("fp16", factor=1e7)
    dropped = capsys.readouterr().out.count("a gradient overflowed in fp16 at loss scale")
    assert dropped > 0
    assert result["choices"]["loss_scale"] == 65536.0 / 2**dropped
    assert result["norms"][:dropped] == [0.0] * dropped
    assert all(bool(value.isfinite().all()) for value in result["weights"].values())


def test_fp16_trains_nearly_the_same_as_fp32():
    assert max_difference(train("fp16")["weights"], train("fp32")["weights"]) < 5e-3


def test_activation_checkpointing_changes_nothing_and_saves_memory():
    plain = train()
    checkpointed = train(activation_checkpointing=(Block,))
    assert max_difference(plain["weights"], checkpointed["weights"]) == 0
    assert peak(activation_checkpointing=(Block,)) < 0.7 * peak()


def peak(**wrap):
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Sequential(*(Block() for _ in range(8))), **wrap)
        inputs = torch.randn(64, 256, WIDTH, device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        model(inputs).sum().backward()
        return torch.cuda.max_memory_allocated()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_model_trains_the_same(ranks):
    plain, compiled = ranks(1, train, "fp32", timeout=100)[0], ranks(1, train, "fp32", 2, True, timeout=250)[0]
    assert compiled["choices"]["compile"] is True
    assert max_difference(plain["weights"], compiled["weights"]) < 1e-5


def test_channels_last_trains_the_same():
    def weights(channels_last):
        torch.manual_seed(0)
        with Run(global_batch=8, seed=0, precision="fp32") as run:
            net = nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
            model = run.wrap(nn.Sequential(net, nn.Linear(16, CLASSES)), channels_last=channels_last)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(2))
            for epoch in run.shard(TensorDataset(images, torch.arange(32) % CLASSES)).epochs(3):
                for step in epoch:
                    for inputs, labels in step:
                        step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return dict(model.named_parameters())

    plain, last = weights(False), weights(True)
    assert last["0.0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert max_difference(plain, last) < 1e-4
