"""Repeat a small training of a recipe with several seeds, to choose the threshold that a test checks.

    OMP_NUM_THREADS=1 python -m tests.recipes.seed_spread cfg_diffusion [--seeds 5]

It prints each metric of every seed, as logged last, then the minimum, the maximum and their difference. One rank is
enough: the number of ranks does not change the result. A threshold is the worst of the seeds, moved by the difference
between the best and the worst: another CPU rounds differently, and a training amplifies it like another seed.
"""

import argparse
import os
import tempfile
from pathlib import Path

from tests.recipes.trained import SMALL_RUNS, TIMINGS, small_run, train, truncated_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", choices=list(SMALL_RUNS), metavar="RUN", help=", ".join(SMALL_RUNS))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = temporary
        models = truncated_models(Path(temporary)) if {"distill", "finetune", "latent_adapter"} & {
            SMALL_RUNS[name][0] for name in arguments.runs
        } else {}  # fmt: skip
        for name in arguments.runs:
            recipe, options = small_run(name, models)
            metrics = [
                train(recipe, Path(temporary) / f"{name}-{seed}", options | {"seed": seed})[1]
                for seed in range(arguments.seeds)
            ]
            for key in sorted(metrics[0].keys() - TIMINGS - {"step"}):
                values = [each[key] for each in metrics]
                listed = " ".join(f"{value:.4g}" for value in values)
                low, high = min(values), max(values)
                print(f"{name} {key}: {listed} (from {low:.4g} to {high:.4g}, spread {high - low:.4g})", flush=True)


if __name__ == "__main__":
    main()
