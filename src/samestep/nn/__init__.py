"""Modules, losses and measures that keep the laws: what they do to a sample does not depend on its ranks."""

from samestep.nn.distillation import Projection, TopK, distill_loss, match_features, similarity_correlation, top_k
from samestep.nn.guidance import ConditioningDropout, guided, unmask, unmasking_noise
from samestep.nn.layers import embedded, losses_after, next_token_losses, prefix_shape, resnet, transformer
from samestep.nn.metrics import class_counts, class_scores, fixation_counts, fixation_density, saliency_measures

__all__ = [
    "ConditioningDropout",
    "Projection",
    "TopK",
    "class_counts",
    "class_scores",
    "distill_loss",
    "embedded",
    "fixation_counts",
    "fixation_density",
    "guided",
    "losses_after",
    "match_features",
    "next_token_losses",
    "prefix_shape",
    "resnet",
    "saliency_measures",
    "similarity_correlation",
    "top_k",
    "transformer",
    "unmask",
    "unmasking_noise",
]
