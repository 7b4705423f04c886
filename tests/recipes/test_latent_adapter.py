"""The recipe latent_adapter: latents carry the text to frozen models, with the same result on one rank and on two.

The values by seed come from `OMP_NUM_THREADS=1 python -m tests.recipes.seed_spread RUN`.
"""

import pytest
import torch
from transformers import AutoConfig

from recipes import latent_adapter
from samestep.assets import minilm
from samestep.errors import DataError
from tests.recipes.trained import TIMEOUT, assert_same_metrics, small_run, train, train_on_one_and_two


@pytest.mark.slow
def test_two_ranks_train_the_same_encoder_for_two_frozen_models_as_one(ranks, tmp_path, models):
    difference, one, two = train_on_one_and_two(ranks, small_run("latent_adapter_truncated", models), tmp_path)
    assert difference < 1e-6
    assert_same_metrics(one, two, rel=1e-5)
    # A truncated model understands no text; its prefix can learn to correct the worst errors. Seeds 0 to 4: 1.56e6
    # 1.42e6 1.63e6 1.70e6 1.47e6 instead of 2.44e7 with one layer, 2.87e5 4.21e5 2.27e5 4.47e5 2.52e5 instead of 7.91e7
    # with two.
    for number in range(2):
        assert two[f"perplexity/model{number}/latents"] < two[f"perplexity/model{number}/nothing"] / 10
    weights = torch.load(tmp_path / "two" / "weights.pt", weights_only=True)
    layers = [len(weights[f"prefixes.{number}.bias"]) // (2 * 3 * 64) for number in range(2)]
    assert layers == [1, 2]
    assert {name.split(".")[0] for name in weights} == {
        "adapters", "encoder", "gist", "input_projection", "pooling", "position_embedding", "prefixes", "refiner",
    }  # fmt: skip


@pytest.mark.slow
def test_latents_tell_the_full_model_which_text_it_is(ranks, tmp_path, models):
    recipe, options = small_run("latent_adapter", models)
    (_, metrics), *_ = ranks(2, train, recipe, tmp_path, options, timeout=TIMEOUT)
    full, latents, another, nothing = (
        metrics[f"perplexity/model0/{prefix}"] for prefix in ("full_text", "latents", "latents_of_another", "nothing")
    )
    assert full < nothing / 10  # 28.7 and 821, without any training
    # Seeds 0 to 4: 36.4 16.8 14.0 15.0 9.1, with the latents of another text 783 590 672 666 793. The latter show what
    # was learned about the language alone.
    assert latents < nothing / 5
    assert latents < another / 3


@pytest.mark.slow
def test_each_latent_is_initialized_as_its_part_of_the_text(models):
    config = AutoConfig.from_pretrained(models[1])
    encoder = latent_adapter.LatentEncoder([config], latents=2, width=32, max_length=8).eval()
    text = torch.eye(8, config.hidden_size)[None]
    ((soft_tokens, key_values),), gist = encoder(text, torch.arange(8)[None] < 6)
    assert soft_tokens.shape == (1, 2, config.hidden_size)
    assert key_values.shape == (1, 2, 1, 3, 2, 64)
    assert gist.shape == (1, config.hidden_size)
    weights = (soft_tokens - encoder.adapters[0].bias)[0, :, :8]
    assert weights.sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert weights[:, 6:].abs().max() < 1e-6  # padding has no weight
    assert weights[0, :3].sum() > 0.8
    assert weights[1, 3:6].sum() > 0.8


def test_invalid_paths_of_models_and_of_texts_raise(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist: pass the folder of a Hugging Face model with"):
        latent_adapter.main(out=tmp_path / "out", models=[tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"no\.txt is not a file: pass a text file with one sentence per line"):
        latent_adapter.main(out=tmp_path / "out", models=[minilm()], texts=tmp_path / "no.txt")
