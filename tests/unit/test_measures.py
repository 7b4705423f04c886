"""Measures of saliency, classes, similarities and next words, against their definitions and against scikit-learn."""

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
    saliency_measures,
    similarity_correlation,
)


def test_measures_of_saliency_are_those_of_their_definitions():
    luck = torch.Generator().manual_seed(0)
    logs = torch.randn(2, 6, 8, generator=luck).flatten(1).log_softmax(1).view(2, 6, 8)
    fixations = torch.tensor([[[0, 0], [5, 7], [2, 3], [2, 3], [-1, -1]], [[1, 1], [4, 4], [3, 0], [-1, -1], [-1, -1]]])
    counts = fixation_counts(fixations, 6, 8)
    assert counts.sum((1, 2)).tolist() == [4, 3]
    assert counts[0, 2, 3] == 2
    found = saliency_measures(logs, counts, sigma=1.0)
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


def test_a_map_of_equal_values_is_judged_as_chance_and_not_as_nothing():
    counts = fixation_counts(torch.tensor([[[0, 0], [5, 7], [2, 3]]]), 6, 8)
    flat = torch.full((1, 6, 8), -math.log(48))
    found = {name: float(value) for name, value in saliency_measures(flat, counts, sigma=1.0).items()}
    assert (found["nss"], found["cc"], found["auc_judd"]) == (0.0, 0.0, pytest.approx(0.5))
    assert found["kl"] > 0
    # two levels: all that was looked at is on the upper one, with as much that was not
    half = torch.where(counts.roll(1, dims=2) + counts > 0, 1.0, 0.5)
    assert saliency_measures(half.log(), counts, sigma=1.0)["auc_judd"] == pytest.approx(1 - 0.5 * 3 / 45)


def test_macro_f1_and_accuracy_are_those_of_scikit_learn_and_add_up_over_batches():
    from sklearn.metrics import accuracy_score, f1_score

    luck = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(0, 5, (2, 100), generator=luck)
    weights = (torch.arange(100) < 90).float()  # what stands for padding counts nowhere
    told = class_scores(class_counts(labels, guesses, 5, weights))
    assert told["accuracy"] == pytest.approx(accuracy_score(labels[:90], guesses[:90]))
    assert told["macro_f1"] == pytest.approx(f1_score(labels[:90], guesses[:90], average="macro"))
    parts = class_counts(labels[:30], guesses[:30], 5) + class_counts(labels[30:90], guesses[30:90], 5)
    assert class_scores(parts) == told


def test_similarities_of_every_pair_count_once_and_widths_may_differ():
    luck = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(6, 4, generator=luck), torch.randn(6, 7, generator=luck)

    def cosines(vectors: torch.Tensor) -> list[float]:
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        return [float(unit[a] @ unit[b]) for a in range(6) for b in range(a + 1, 6)]

    wanted = np.corrcoef(cosines(student), cosines(teacher))[0, 1]
    assert similarity_correlation(student, teacher) == pytest.approx(wanted, abs=1e-6)


def test_a_next_token_is_judged_by_the_logits_before_it():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2], logits[0, 2, 1] = math.inf, math.inf  # sure of the second token; what follows the last is unknown
    losses = next_token_losses(logits.half(), torch.tensor([[0, 2, -1]]))
    assert losses.dtype == torch.float32
    assert losses.shape == (1, 2)
    assert losses[0, 1] == pytest.approx(math.log(4))


MISUSES = {
    "saliency_measures got a density of shape (4, 4) and fixations of shape (1, 4, 4): both must be (rows, height": (
        lambda: saliency_measures(torch.zeros(4, 4), torch.zeros(1, 4, 4), 1.0)
    ),
    "fixation_density got sigma=0: give the width of the Gaussian in pixels, above 0": (
        lambda: fixation_density(torch.ones(1, 4, 4), 0)
    ),
    "class_counts got labels of shape (3,) and guesses of shape (3, 2): give one class a row for both, such as": (
        lambda: class_counts(torch.zeros(3).long(), torch.zeros(3, 2).long(), 2)
    ),
    "similarity_correlation got vectors of shape (2, 4) from the student and (2, 4) from the teacher: both must be": (
        lambda: similarity_correlation(torch.zeros(2, 4), torch.zeros(2, 4))
    ),
    "next_token_losses got logits of shape (2, 4, 9) for tokens of shape (2, 5): give (rows, length, words)": (
        lambda: next_token_losses(torch.zeros(2, 4, 9), torch.zeros(2, 5).long())
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_what_cannot_be_measured_is_refused(text):
    with pytest.raises((SamestepError, StepError), match=re.escape(text)):
        MISUSES[text]()
