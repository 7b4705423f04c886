"""Draw docs/images/parity.svg: how far the weights of one rank and of two are apart, step by step.

`python tools/parity_curves.py` trains three models in fp32, bf16 and fp64, all on one rank and then on two, and plots
the largest difference of any weight after every step. It takes about a minute on two cores. The description in the
picture has the numbers of the table in docs/parity.md, so that a test can compare them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.parallel.precision import Precision

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "parity.svg"
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "fp64")
COLORS = {"bf16": "#c26a1e", "fp32": "#3f6fb5", "fp64": "#2b8a66"}
STEPS, GLOBAL_BATCH = 60, 64


def mlp() -> nn.Module:
    """Two linear layers with GELU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def conv_net() -> nn.Module:
    """Convolutions with BatchNorm, ReLU and max-pooling, as most scripts write them: with a bias before BatchNorm."""
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *body, nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """Two layers of attention over the rows of an image."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 32), encoder, nn.Flatten(), nn.Linear(8 * 32, 10))


MODELS = {
    "MLP, GELU, AdamW": mlp,
    "conv net, ReLU, BatchNorm, AdamW": conv_net,
    "transformer, LayerNorm, AdamW": transformer,
}


def train_all(out: Path) -> None:
    """Train every model in every precision on the ranks of this process; write the weights after every step."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels))
    for (number, build), precision in product(enumerate(MODELS.values()), PRECISIONS):
        torch.manual_seed(0)
        net = build()  # before the run, so that all precisions start from the same weights
        with Run(global_batch=GLOBAL_BATCH, seed=0, precision=precision, folder=out / "logs") as run:
            trained = train(run, net, data)
            if run.is_main:
                torch.save(trained, out / f"{number}-{precision}.pt")


def train(run: Run, net: nn.Module, data: TensorDataset) -> dict[str, torch.Tensor]:
    """Train for some steps; returns the mean loss of each, and the weights after each, (steps, parameters)."""
    weights: list[torch.Tensor] = []
    losses: list[float] = []
    model = run.wrap(net, sync_batchnorm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in run.shard(data, shuffle=True).epochs(1 + STEPS * GLOBAL_BATCH // len(data)):
        for step in epoch:
            for inputs, labels in step:
                step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(run.mean(step.loss))
            weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().double().clone())
            if len(weights) == STEPS:
                break
    return {"weights": torch.stack(weights), "losses": torch.tensor(losses, dtype=torch.float64)}


def plot(folders: list[Path], to: Path) -> None:
    """One panel per model, one line per precision; the numbers of the table go into the description."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "samestep", "svg.fonttype": "none", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(10, 3.4), sharey=True, layout="constrained")
    table: dict[str, list[str]] = {}
    in_losses = dict.fromkeys(PRECISIONS, 0.0)
    for number, (name, panel) in enumerate(zip(MODELS, panels, strict=True)):
        for precision in PRECISIONS:
            one, two = (torch.load(folder / f"{number}-{precision}.pt", weights_only=True) for folder in folders)
            differences = (one["weights"] - two["weights"]).abs().amax(dim=1)
            in_loss = float((one["losses"] - two["losses"]).abs().max())
            in_losses[precision] = max(in_losses[precision], in_loss)
            table.setdefault(name, []).append(f"{differences[9]:.1e}")
            panel.plot(range(1, len(differences) + 1), differences, label=precision, color=COLORS[precision])
            last = f"{differences[-1]:.1e} after {len(differences)}"
            print(f"{name:34} {precision}: {differences[9]:.1e} after 10 steps, {last}; losses differ by {in_loss:.1e}")
        panel.set(xlabel="step", title=name, yscale="log", ylim=(1e-17, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("largest difference of a weight,\n1 rank and 2 ranks")
    panels[0].legend(loc="center right", bbox_to_anchor=(1.0, 0.33))
    table["losses"] = [f"{difference:.1e}" for difference in in_losses.values()]
    figure.savefig(to, metadata={"Date": None, "Description": json.dumps(table)})


def main() -> None:
    """Train on one rank and on two, and plot; with --train, be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.train is not None:
        train_all(options.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / f"{ranks}-ranks" for ranks in (1, 2)]
        for ranks, out in enumerate(folders, start=1):
            out.mkdir()
            launch = ["-m", "samestep", "run", "--nproc-per-node", str(ranks), "--folder", str(out / "logs")]
            subprocess.run([sys.executable, *launch, __file__, "--train", str(out)], check=True, stdout=sys.stderr)
        plot(folders, options.to)


if __name__ == "__main__":
    main()
