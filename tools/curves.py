"""Plot metrics of a run: `python tools/curves.py runs/first val/accuracy val/macro_f1 --to curves.svg`."""

import argparse
from pathlib import Path

import matplotlib

from samestep import read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot


def main(folder: Path, names: list[str], to: Path, title: str, label: str) -> None:
    """Plot each metric over the steps at which it was logged."""
    records = read_metrics(folder / "metrics.jsonl", by_step=True)
    matplotlib.rcParams["svg.hashsalt"] = "samestep"  # the same values give the same file
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for name in names:
        points = [(record["step"], record[name]) for record in records if name in record]
        if not points:
            known = sorted({metric for record in records for metric in record if "/" in metric})
            raise SystemExit(f"{folder} has no metric {name}: choose from {', '.join(known)}")
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 60 else None)
    axes.set(xlabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("names", nargs="+", help="the metrics to plot")
    parser.add_argument("--to", type=Path, default=Path("curves.svg"))
    parser.add_argument("--title", default="")
    parser.add_argument("--label", default="step", help="label of the x axis, such as epoch")
    main(**vars(parser.parse_args()))
