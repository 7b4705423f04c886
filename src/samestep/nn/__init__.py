"""Modules, losses and measures that keep the laws: what they do to a sample does not depend on its ranks."""

from samestep.nn.classes import class_counts, class_scores
from samestep.nn.conditioning import ConditioningDropout
from samestep.nn.distill import Projection, TopK, distill_loss, match_features, similarity_correlation, top_k
from samestep.nn.guidance import guided
from samestep.nn.prefix import embedded, losses_after, prefix_shape
from samestep.nn.resnet import resnet
from samestep.nn.saliency import fixation_counts, fixation_density, saliency_measures
from samestep.nn.tokens import next_token_losses
from samestep.nn.transformer import transformer
from samestep.nn.unmasking import unmask, unmasking_luck

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
    "unmasking_luck",
]
