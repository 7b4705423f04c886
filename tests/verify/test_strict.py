"""`--strict`: choices that depend on the number of ranks are notes, and samestep's own recipes make none of them."""

from pathlib import Path

import pytest

from samestep.verify import verify

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
mode = sys.argv[1]
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 4, generator=generator))
torch.manual_seed(0)
norm = nn.BatchNorm1d(4) if mode == "batchnorm" else nn.LayerNorm(4)
model = DDP(nn.Sequential(nn.Linear(4, 4), norm))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(data))
for inputs, targets in loader:
    optimizer.zero_grad()
    if mode == "contrastive":
        loss = cross_entropy(model(inputs) @ targets.T, torch.arange(len(inputs)))
    else:
        loss = mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
"""
RECIPES = {
    "digits": ["--epochs", "1", "--global-batch", "512"],
    "contrastive": ["--epochs", "1", "--global-batch", "500"],
    "cfg_diffusion": ["--epochs", "1", "--global-batch", "512", "--width", "16", "--layers", "1", "--samples", "2",
                      "--passes", "2"],
    "saliency": ["--epochs", "1", "--width", "16", "--height", "16"],
    "progressive_images": ["--epochs", "2", "--size", "8", "--global-batch", "128", "--every", "8"],
    "lightning_images": ["--epochs", "1", "--global-batch", "400"],
    "distill": ["--epochs", "1", "--count", "48", "--held-out", "9", "--length", "8", "--global-batch", "16"],
    "finetune": ["--epochs", "1", "--count", "32", "--held-out", "8", "--length", "12", "--model-layers", "1"],
    "latent_adapter": ["--epochs", "1", "--count", "32", "--held-out", "8", "--model-layers", "1"],
}  # fmt: skip


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


@pytest.mark.parametrize(
    ("mode", "code", "source"),
    [("batchnorm", "SS207", "model = DDP("), ("contrastive", "SS209", "loss = cross_entropy("), ("mean", None, "")],
)
def test_a_legitimate_choice_is_a_note_with_strict_only(interpreters, script, mode, code, source):
    assert verify(script, [mode], interpreters=interpreters).findings == ()
    notes = verify(script, [mode], interpreters=interpreters, strict=True).findings
    found = [(each.code, each.severity, each.location.source.startswith(source)) for each in notes if each.location]
    assert found == ([(code, "note", True)] if code else []), notes


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_no_finding_with_strict(interpreters, tmp_path, monkeypatch, model_cache, recipe):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(model_cache))
    verdict = verify(REPOSITORY / "recipes" / f"{recipe}.py", RECIPES[recipe], interpreters=interpreters, strict=True)
    assert [(each.code, str(each.location), each.summary) for each in verdict.findings] == []
    assert verdict.failure == ""
    assert verdict.steps > 0
