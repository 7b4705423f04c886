"""Modules, losses and metrics whose result for a sample does not depend on the number of ranks."""

from samestep.nn.distillation import Projection, TopK, distill_loss, match_features, similarity_correlation, top_k
from samestep.nn.guidance import ConditioningDropout, guided, unmask, unmasking_noise
from samestep.nn.metrics import class_counts, class_scores, fixation_counts, fixation_density, saliency_metrics
from samestep.nn.networks import (
    embed_tokens,
    losses_with_prefix,
    next_token_losses,
    prefix_shape,
    resnet,
    transformer,
)

__all__ = [
    "ConditioningDropout", "Projection", "TopK", "class_counts", "class_scores", "distill_loss", "embed_tokens",
    "fixation_counts", "fixation_density", "guided", "losses_with_prefix", "match_features", "next_token_losses",
    "prefix_shape", "resnet", "saliency_metrics", "similarity_correlation", "top_k", "transformer", "unmask",
    "unmasking_noise",
]  # fmt: skip
