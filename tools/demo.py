"""The demo: one training on one rank and on several, side by side; the numbers must be the same."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from samestep import read_metrics

ROOT = Path(__file__).parent.parent
OUT = ROOT / "runs" / "demo"
LIMIT = 1e-6


def train(ranks: int, out: Path) -> float:
    """Run the recipe on `ranks` ranks, its progress visible; the seconds it took."""
    script = [str(ROOT / "recipes" / "digits.py"), "--out", str(out)]
    command = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", str(ranks), "--folder", str(out), *script]
    began = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT)
    return time.monotonic() - began


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference between two sets of weights."""
    a, b = (torch.load(path / "weights.pt", weights_only=True) for path in (one, other))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def epochs(folder: Path) -> list[dict[str, float]]:
    """What was logged after each epoch."""
    return [record for record in read_metrics(folder / "metrics.jsonl", by_step=True) if "epoch/loss" in record]


def plot(folders: dict[str, Path], path: Path) -> None:
    """Draw the loss of every step of each run into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (label, folder), (width, alpha) in zip(folders.items(), ((5.0, 0.35), (1.2, 1.0)), strict=True):
        records = [r for r in read_metrics(folder / "metrics.jsonl", by_step=True) if "train/loss" in r]
        steps, losses = [r["step"] for r in records], [r["train/loss"] for r in records]
        axes.plot(steps, losses, label=label, linewidth=width, alpha=alpha)
    axes.set(xlabel="step", ylabel="train/loss", yscale="log", title="N ranks, the same step")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train twice, compare, draw, tell."""
    many = max(2, torch.cuda.device_count())
    folders = {"1 rank": OUT / "1-rank", f"{many} ranks": OUT / f"{many}-ranks"}
    console = Console()
    shutil.rmtree(OUT, ignore_errors=True)
    seconds: dict[str, float] = {}
    for ranks, (label, folder) in zip((1, many), folders.items(), strict=True):
        console.rule(f"training on {label}")
        seconds[label] = train(ranks, folder)
    plot(folders, OUT / "curves.png")
    (one, one_folder), (other, other_folder) = folders.items()
    summaries = {label: json.loads((folder / "summary.json").read_text()) for label, folder in folders.items()}
    difference = largest_difference(one_folder, other_folder)

    table = Table(title="the same training, twice")
    for heading in ("", one, other, "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    for a, b in zip(epochs(one_folder), epochs(other_folder), strict=True):
        gap = abs(a["epoch/loss"] - b["epoch/loss"])
        losses = f"{a['epoch/loss']:.6f}", f"{b['epoch/loss']:.6f}"
        table.add_row(f"loss after epoch {a['step']:.0f}", *losses, f"{gap:.1e}")
    last = epochs(one_folder)[-1]["epoch/accuracy"], epochs(other_folder)[-1]["epoch/accuracy"]
    table.add_row("test accuracy", *(f"{value:.4f}" for value in last), f"{abs(last[0] - last[1]):.1e}")
    samples = [summaries[label]["samples"] for label in folders]
    table.add_row("samples counted", *(f"{count:,}" for count in samples), str(samples[0] - samples[1]))
    table.add_row("seconds", *(f"{seconds[label]:.0f}" for label in folders), "")
    table.add_row("largest weight difference", "", "", f"{difference:.1e}")
    console.print(table)
    for label, folder in folders.items():
        place = folder.relative_to(ROOT)
        console.print(f"{label:8} logs: {place}/  weights: {place / 'weights.pt'}")
    console.print(f"plot     {(OUT / 'curves.png').relative_to(ROOT)}")
    same = difference < LIMIT and samples[0] == samples[1]
    verdict = "The same numbers." if same else f"NOT the same: weights differ by {difference:.1e}"
    console.print(f"[bold]{verdict}[/bold]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
