"""The demo: the same training on one rank and on several, and a report of both; the results must be the same."""

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
from samestep.report import read_run, write_report

ROOT = Path(__file__).parent.parent
OUT = ROOT / "runs" / "demo"
LIMIT = 1e-6


def train(ranks: int, out: Path) -> float:
    """Run the digits recipe on `ranks` ranks, showing its progress; return the seconds it took."""
    script = [str(ROOT / "recipes" / "digits.py"), "--out", str(out)]
    command = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", str(ranks), "--folder", str(out), *script]
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT)
    return time.monotonic() - start


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference between the weights of two runs."""
    a, b = (torch.load(folder / "weights.pt", weights_only=True) for folder in (one, other))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def epochs(folder: Path) -> list[dict[str, float]]:
    """The metrics that a run logged after each epoch."""
    return [record for record in read_metrics(folder / "metrics.jsonl", by_step=True) if "epoch/loss" in record]


def plot(folders: dict[str, Path], path: Path) -> None:
    """Plot the loss per step of both runs in one figure."""
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


def compare(folders: dict[str, Path], seconds: dict[str, float], difference: float, samples: list[int]) -> Table:
    """A table with the results of both runs and their difference."""
    table = Table(title="the same training on 1 rank and on several")
    for heading in ("", *folders, "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    one, other = (epochs(folder) for folder in folders.values())
    for a, b in zip(one, other, strict=True):
        losses = a["epoch/loss"], b["epoch/loss"]
        row = f"loss after epoch {a['epoch']:.0f}", *(f"{loss:.6f}" for loss in losses)
        table.add_row(*row, f"{abs(losses[0] - losses[1]):.1e}")
    accuracies = one[-1]["epoch/accuracy"], other[-1]["epoch/accuracy"]
    table.add_row("test accuracy", *(f"{x:.4f}" for x in accuracies), f"{abs(accuracies[0] - accuracies[1]):.1e}")
    table.add_row("samples counted", *(f"{count:,}" for count in samples), str(samples[0] - samples[1]))
    table.add_row("seconds", *(f"{seconds[label]:.0f}" for label in folders), "")
    table.add_row("largest weight difference", "", "", f"{difference:.1e}")
    return table


def main() -> int:
    """Train twice, compare and plot; the exit status is 1 if the results differ."""
    ranks = max(2, torch.cuda.device_count())
    folders = {"1 rank": OUT / "1-rank", f"{ranks} ranks": OUT / f"{ranks}-ranks"}
    console = Console()
    shutil.rmtree(OUT, ignore_errors=True)
    seconds: dict[str, float] = {}
    for count, (label, folder) in zip((1, ranks), folders.items(), strict=True):
        console.rule(f"training on {label}")
        seconds[label] = train(count, folder)
    plot(folders, OUT / "curves.png")
    difference = largest_difference(*folders.values())
    samples = [json.loads((folder / "summary.json").read_text())["samples"] for folder in folders.values()]
    console.print(compare(folders, seconds, difference, samples))
    for label, folder in folders.items():
        relative = folder.relative_to(ROOT)
        console.print(f"{label:8} logs: {relative}/  weights: {relative / 'weights.pt'}")
    console.print(f"plot     {(OUT / 'curves.png').relative_to(ROOT)}")
    report = write_report([read_run(folder) for folder in folders.values()], OUT / "report.html")
    console.print(
        f"report   {report.relative_to(ROOT)}: curves, times and differences of both runs; open it in a browser:"
    )
    console.print(f"         {report.as_uri()}", soft_wrap=True)
    same = difference < LIMIT and samples[0] == samples[1]
    result = "The results are the same." if same else f"The results DIFFER: weights by up to {difference:.1e}"
    console.print(f"[bold]{result}[/bold]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
