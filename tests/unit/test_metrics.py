"""Metrics of saliency, classes, similarities and next tokens, compared with their definitions and scikit-learn."""

import math
import re

import numpy as np
import pytest
import torch

from samestep import SamestepError
from samestep.errors import StepError
from samestep.nn import (
    class_counts,
    class_scores,
    fixation_counts,
    fixation_density,
    next_token_losses,
    saliency_metrics,
    similarity_correlation,
)


def test_saliency_metrics_match_their_definitions():
    rng = torch.Generator().manual_seed(0)
    logs = torch.randn(2, 6, 8, generator=rng).flatten(1).log_softmax(1).view(2, 6, 8)
    fixations = torch.tensor([[[0, 0], [5, 7], [2, 3], [2, 3], [-1, -1]], [[1, 1], [4, 4], [3, 0], [-1, -1], [-1, -1]]])
    counts = fixation_counts(fixations, 6, 8)
    assert counts.sum((1, 2)).tolist() == [4, 3]
    assert counts[0, 2, 3] == 2
    found = saliency_metrics(logs, counts, sigma=1.0)
    for row, density in enumerate(logs.exp()):
        standard = (density - density.mean()) / density.std(correction=0)
        seen = [standard[y, x] for y, x in fixations[row].tolist() if y >= 0]
        assert found["nss"][row] == pytest.approx(float(torch.stack(seen).mean()), abs=1e-5)
        truth = fixation_density(counts, 1.0)[row]
        assert truth.sum() == pytest.approx(1, abs=1e-5)
        pair = torch.stack([density.flatten(), truth.flatten()])
        assert found["cc"][row] == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-5)
        assert found["kl"][row] == pytest.approx(float((truth * (truth / density).log()).nansum()), abs=1e-4)
        assert found["auc_judd"][row] == pytest.approx(judd(density.numpy(), counts[row].numpy() > 0), abs=1e-5)


def judd(density: np.ndarray, seen: np.ndarray) -> float:
    """AUC-Judd step by step, as its authors write it."""
    right, wrong = [0.0], [0.0]
    for number, level in enumerate(sorted(density[seen], reverse=True), start=1):
        right.append(number / seen.sum())
        wrong.append(((density >= level).sum() - number) / (seen.size - seen.sum()))
    return float(np.trapezoid([*right, 1.0], [*wrong, 1.0]))


def test_a_constant_map_scores_like_chance():
    counts = fixation_counts(torch.tensor([[[0, 0], [5, 7], [2, 3]]]), 6, 8)
    flat = torch.full((1, 6, 8), -math.log(48))
    found = {name: float(value) for name, value in saliency_metrics(flat, counts, sigma=1.0).items()}
    assert (found["nss"], found["cc"], found["auc_judd"]) == (0.0, 0.0, pytest.approx(0.5))
    assert found["kl"] > 0
    # two values: all fixated pixels have the higher one, and the same number of other pixels too
    half = torch.where(counts.roll(1, dims=2) + counts > 0, 1.0, 0.5)
    assert saliency_metrics(half.log(), counts, sigma=1.0)["auc_judd"] == pytest.approx(1 - 0.5 * 3 / 45)


def test_macro_f1_and_accuracy_match_scikit_learn_and_add_up_over_batches():
    from sklearn.metrics import accuracy_score, f1_score

    rng = torch.Generator().manual_seed(0)
    labels, predictions = torch.randint(0, 5, (2, 100), generator=rng)
    weights = (torch.arange(100) < 90).float()  # padding has weight 0
    scores = class_scores(class_counts(labels, predictions, 5, weights))
    assert scores["accuracy"] == pytest.approx(accuracy_score(labels[:90], predictions[:90]))
    assert scores["macro_f1"] == pytest.approx(f1_score(labels[:90], predictions[:90], average="macro"))
    parts = class_counts(labels[:30], predictions[:30], 5) + class_counts(labels[30:90], predictions[30:90], 5)
    assert class_scores(parts) == scores


def test_every_pair_of_similarities_counts_once_and_widths_may_differ():
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 4, generator=rng), torch.randn(6, 7, generator=rng)

    def cosines(vectors: torch.Tensor) -> list[float]:
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        return [float(unit[a] @ unit[b]) for a in range(6) for b in range(a + 1, 6)]

    expected = np.corrcoef(cosines(student), cosines(teacher))[0, 1]
    assert similarity_correlation(student, teacher) == pytest.approx(expected, abs=1e-6)


def test_the_loss_of_a_token_comes_from_the_logits_before_it():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2], logits[0, 2, 1] = math.inf, math.inf  # certain of the second token; the third is padding
    losses = next_token_losses(logits.half(), torch.tensor([[0, 2, -1]]))
    assert losses.dtype == torch.float32
    assert losses.shape == (1, 2)
    assert losses[0, 1] == pytest.approx(math.log(4))


MISUSES = {
    "saliency_metrics got a density of shape (4, 4) and fixations of shape (1, 4, 4): both must be (rows, height": (
        lambda: saliency_metrics(torch.zeros(4, 4), torch.zeros(1, 4, 4), 1.0)
    ),
    "fixation_density got sigma=0: pass the width of the Gaussian in pixels, above 0": (
        lambda: fixation_density(torch.ones(1, 4, 4), 0)
    ),
    "class_counts got labels of shape (3,) and predictions of shape (3, 2): pass one class per row for both, such as": (
        lambda: class_counts(torch.zeros(3).long(), torch.zeros(3, 2).long(), 2)
    ),
    "similarity_correlation got vectors of shape (2, 4) from the student and (2, 4) from the teacher: both must be": (
        lambda: similarity_correlation(torch.zeros(2, 4), torch.zeros(2, 4))
    ),
    "next_token_losses got logits of shape (2, 4, 9) for tokens of shape (2, 5): pass (rows, length, vocabulary)": (
        lambda: next_token_losses(torch.zeros(2, 4, 9), torch.zeros(2, 5).long())
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_invalid_shapes_raise(text):
    with pytest.raises((SamestepError, StepError), match=re.escape(text)):
        MISUSES[text]()
