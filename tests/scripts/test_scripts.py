"""Ordinary training scripts give the same weights and the same logged numbers on 1, 2 and 3 ranks.

The scripts in this folder are the kinds that people publish, converted as a new user would convert them. Their
randomness is ordinary: dropout layers, `torch.randn_like` in `forward`, augmentation with torch's, Python's and numpy's
global generators. They run in float64, where a difference of 1e-12 is rounding and nothing else.
"""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest
import torch

from samestep import read_metrics
from samestep.loggers.run_files import WAIT_PREFIX
from tests.launch.launched import start

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent
TOLERANCE = 1e-12  # relative to the largest weight of the model, or to the logged value
TIMINGS = {"time", "train/samples_per_s"}
TIMEOUT = 250.0  # seconds; the first script of a process imports transformers or Lightning

# Test -> script and options. Global batches are not multiples of 3, and the last step of an epoch is smaller.
CASES = {
    "vae": ("vae",),
    "ddpm": ("ddpm",),
    "gan": ("gan",),
    "mnist_cnn": ("mnist_cnn",),
    "language_model": ("language_model", "--attention", "eager"),
    "language_model_sdpa": ("language_model", "--attention", "sdpa"),
    "bert": ("bert",),
    "vgg": ("vgg",),
    "lstm": ("lstm",),
    "siamese": ("siamese",),
    "iterable_lm": ("iterable_lm",),
    "stochastic_depth": ("stochastic_depth",),
    "lightning_autoencoder": ("lightning_autoencoder",),
}
# These need all rows of a rank in one micro-batch: BatchNorm, comparisons between samples, manual optimization.
WHOLE_STEPS = {
    "simclr": ("simclr",),
    "vgg_batch_norm": ("vgg", "--batch-norm"),
    "lightning_gan": ("lightning_gan",),
}


@pytest.fixture(autouse=True)
def _compute_in_float64(monkeypatch):
    monkeypatch.setenv("SAMESTEP_PRECISION", "fp64")


def run_script(name: str, *arguments: str) -> None:
    """Run a script in a warm rank as `python NAME.py ARGUMENTS` would."""
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        with _lightning() if name.startswith("lightning") else contextlib.nullcontext():
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


@contextlib.contextmanager
def _lightning():
    """Ignore Lightning's warnings about itself, and destroy the process group that it leaves open."""
    import gc

    import torch.distributed as dist

    from tests.lightning.trained import quiet

    with quiet():
        yield
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def train(ranks, size: int, case: tuple[str, ...], *options: str):
    """Train a script on this many ranks; return its weights and what it has logged by (step, name)."""
    name, *arguments = case
    folder = Path.cwd() / "-".join([str(size), *options])
    if name.startswith("lightning"):
        arguments += ["--precision", "64-true"]
    arguments += ["--epochs", "2", "--out", str(folder), *options]
    ranks(size, run_script, name, *arguments, timeout=TIMEOUT)
    return results(folder)


def results(folder: Path) -> tuple[dict[str, torch.Tensor], dict[tuple[int, str], float]]:
    weights = torch.load(folder / "weights.pt", weights_only=True)
    records = read_metrics(folder / "metrics.jsonl", by_step=True)
    logged = {
        (record["step"], name): value
        for record in records
        for name, value in record.items()
        if name not in TIMINGS and not name.startswith(WAIT_PREFIX)
    }
    return weights, logged


def assert_same(results, expected) -> None:
    (weights, logged), (expected_weights, expected_logged) = results, expected
    assert weights.keys() == expected_weights.keys()
    largest = max(float(value.abs().max()) for value in expected_weights.values() if value.is_floating_point())
    assert 0.01 < largest < 100
    for name, value in expected_weights.items():
        if value.is_floating_point():
            assert value.dtype == torch.float64, name
        difference = float((weights[name] - value).abs().max()) / largest
        assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"
    assert logged.keys() == expected_logged.keys()
    for name, value in expected_logged.items():
        assert logged[name] == pytest.approx(value, rel=TOLERANCE, abs=0), name


@pytest.mark.parametrize("case", CASES)
def test_a_script_has_the_same_result_on_any_number_of_ranks_and_micro_batches(case, ranks):
    one = train(ranks, 1, CASES[case])
    assert_same(train(ranks, 2, CASES[case]), one)
    assert_same(train(ranks, 3, CASES[case]), one)
    assert_same(train(ranks, 2, CASES[case], "--micro-batch", "4"), one)


@pytest.mark.parametrize("case", WHOLE_STEPS)
def test_a_script_with_one_micro_batch_per_step_has_the_same_result_on_any_number_of_ranks(case, ranks):
    one = train(ranks, 1, WHOLE_STEPS[case])
    assert_same(train(ranks, 2, WHOLE_STEPS[case]), one)
    assert_same(train(ranks, 3, WHOLE_STEPS[case]), one)


def test_augmentation_does_not_depend_on_data_workers(ranks):
    one = train(ranks, 1, CASES["vgg"])
    assert_same(train(ranks, 2, CASES["vgg"], "--num-workers", "2"), one)


def test_a_script_that_continues_on_other_ranks_has_the_result_of_one_that_was_not_interrupted(ranks):
    one = train(ranks, 1, CASES["bert"])
    folder = str(Path.cwd() / "continued")
    for epochs, size in ((1, 2), (2, 3)):
        ranks(size, run_script, "bert", "--epochs", str(epochs), "--out", folder, timeout=TIMEOUT)
    assert_same(results(Path(folder)), one)


def test_a_script_has_the_same_result_when_samestep_run_starts_it(ranks, tmp_path):
    one = train(ranks, 1, CASES["siamese"])
    script = (SCRIPTS / "siamese.py").read_text()
    launch = ("--nproc-per-node", "2", "--precision", "fp64")
    ended = start(tmp_path, script, *launch, "train.py", "--epochs", "2", "--out", "launched").finish()
    assert ended.code == 0, ended.err
    assert_same(results(tmp_path / "launched"), one)
