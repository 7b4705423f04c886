"""The recipe finetune: adapters of a frozen language model, the same on one rank and on two, and whole weights of it.

The values by seed come from `OMP_NUM_THREADS=1 python -m tests.recipes.seed_spread finetune`.
"""

import json

import pytest
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from recipes import finetune
from samestep.cli.main import main
from samestep.errors import DataError
from tests.recipes.trained import TIMEOUT, assert_same_metrics, small_run, train, train_on_one_and_two


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters_as_one(ranks, tmp_path, models):
    difference, one, two = train_on_one_and_two(
        ranks, small_run("finetune", models), tmp_path, strategy="fsdp", gradient_checkpointing=True
    )
    assert difference < 1e-6
    assert_same_metrics(one, two, rel=1e-5)
    # A truncated model understands no text; its adapters learn to correct the worst errors. Seeds 0 to 4: 2.06e7 2.08e7
    # 2.07e7 2.07e7 2.24e7 instead of 5.55e7.
    assert two["perplexity/trained"] < two["perplexity/untrained"] / 2.2
    folder = tmp_path / "two" / "step-00000008"
    names = json.loads((folder / "index.json").read_bytes())
    assert all(".lora_" in name for name in names if name.startswith("model/"))
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < (models[2] / "model.safetensors").stat().st_size / 4


@pytest.mark.slow
def test_merged_weights_give_the_perplexity_of_the_trained_model(ranks, tmp_path, models, capsys):
    recipe, options = small_run("finetune", models)
    ((_, metrics),) = ranks(1, train, recipe, tmp_path / "out", options, timeout=TIMEOUT)
    merged = tmp_path / "merged"
    assert main(["checkpoint", "export", str(tmp_path / "out"), "--merge", "--to", str(merged)]) == 0
    assert f"{merged}: config.json, " in capsys.readouterr().out
    own = load_file(models[2] / "model.safetensors")
    assert {name: value.shape for name, value in own.items()} == {
        name: value.shape for name, value in load_file(merged / "model.safetensors").items()
    }
    again = options | {"model": merged, "global_batch": 128}
    ((_, found),) = ranks(1, train, recipe, tmp_path / "again", again, timeout=TIMEOUT)
    assert found["perplexity/untrained"] == pytest.approx(metrics["perplexity/trained"], rel=1e-4)


class Interrupted(Exception):
    pass


def train_until(count, folder, options):
    """Train until the optimizer has made `count` steps."""
    steps = []

    def stop(*_):
        steps.append(1)
        if len(steps) == count:
            raise Interrupted

    hook = register_optimizer_step_post_hook(stop)
    try:
        finetune.main(out=folder, **options)
    finally:
        hook.remove()


@pytest.mark.slow
def test_an_interrupted_training_continues_on_another_number_of_ranks(ranks, tmp_path, models):
    recipe, options = small_run("finetune", models)
    options |= {"epochs": 2, "count": 64, "held_out": 1}  # four steps each; with FSDP one rank evaluates padding
    ((expected, _),) = ranks(1, train, recipe, tmp_path / "one", options, timeout=TIMEOUT)
    for text in ranks.errors(2, train_until, 6, tmp_path / "two", options | {"strategy": "fsdp"}, timeout=TIMEOUT):
        assert "Interrupted" in text
    ((resumed, _),) = ranks(1, train, recipe, tmp_path / "two", options, timeout=TIMEOUT)
    assert max(float((expected[key] - resumed[key]).abs().max()) for key in expected) < 1e-6


def test_an_invalid_path_raises(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist: pass the folder of a Hugging Face model with"):
        finetune.main(out=tmp_path / "out", model=tmp_path / "nowhere")
