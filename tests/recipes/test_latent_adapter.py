"""The recipe latent_adapter: latents carry the text to frozen models, and the same on one rank and on two."""

import pytest
import torch
from tests.recipes.learnt import PATIENCE, on_one_and_two, same_numbers, train
from transformers import AutoConfig

from recipes import latent_adapter
from samestep.assets import minilm
from samestep.errors import DataError


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns_around_two_frozen_models(ranks, tmp_path, smollm2_by_layers):
    options = {"models": [smollm2_by_layers[1], smollm2_by_layers[2]], "count": 160, "held_out": 12, "length": 10}
    gap, alone, together = on_one_and_two(ranks, "latent_adapter", tmp_path, **options)
    assert gap < 1e-6
    same_numbers(alone, together, rel=1e-5)
    for at in range(2):
        # A cut is no language model and understands nothing; what it can learn is a prefix that mends the worst of it.
        assert together[f"perplexity/model{at}/latents"] < together[f"perplexity/model{at}/nothing"] / 10
    weights = torch.load(tmp_path / "two" / "weights.pt", weights_only=True)
    assert [len(weights[f"prefixes.{at}.bias"]) // (2 * 3 * 64) for at in range(2)] == [1, 2]  # layers of each
    kept = {name.split(".")[0] for name in weights}
    assert kept == {"adapters", "choose", "encoder", "gist", "narrow", "places", "prefixes", "refiner"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_latents_tell_the_real_model_which_text_it_is(ranks, tmp_path, smollm2_by_layers):
    options = {"models": [smollm2_by_layers[30]], "count": 256, "held_out": 24, "length": 12}
    (_, told), *_ = ranks(2, train, "latent_adapter", tmp_path, options, timeout=PATIENCE)
    full, latents, another, nothing = (
        told[f"perplexity/model0/{given}"] for given in ("full_text", "latents", "latents_of_another", "nothing")
    )
    assert full < nothing / 10
    assert latents < nothing / 3
    assert latents < another / 1.5  # what is learnt of the language alone would help with any text


@pytest.mark.slow
def test_each_latent_begins_as_its_stretch_of_the_text(smollm2_by_layers):
    config = AutoConfig.from_pretrained(smollm2_by_layers[1])
    writer = latent_adapter.Writer([config], latents=2, width=32, longest=8).eval()
    text = torch.eye(8, config.hidden_size)[None]
    ((soft, deep),), gist = writer(text, torch.arange(8)[None] < 6)
    assert soft.shape == (1, 2, config.hidden_size)
    assert deep.shape == (1, 2, 1, 3, 2, 64)
    assert gist.shape == (1, config.hidden_size)
    shares = (soft - writer.adapters[0].bias)[0, :, :8]
    assert shares.sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert shares[:, 6:].abs().max() < 1e-6  # behind the end there is nothing
    assert shares[0, :3].sum() > 0.8
    assert shares[1, 3:6].sum() > 0.8


def test_a_path_that_is_no_model_or_no_text_says_what_is_expected(tmp_path):
    with pytest.raises(
        DataError, match=r"nowhere does not exist: expected is the folder of a Hugging Face model, with"
    ):
        latent_adapter.main(out=tmp_path / "out", models=[tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"no\.txt is no file: expected is a text file with one sentence a line"):
        latent_adapter.main(out=tmp_path / "out", models=[minilm()], texts=tmp_path / "no.txt")
