"""Modules, losses and metrics whose result for a sample does not depend on the number of ranks."""

from samestep.nn.linear_loss import linear_cross_entropy
from samestep.nn.losses_and_metrics import (
    Projection,
    TopK,
    class_counts,
    class_scores,
    distill_loss,
    fixation_counts,
    fixation_density,
    match_features,
    saliency_metrics,
    similarity_correlation,
    top_k,
)
from samestep.nn.networks import (
    ConditioningDropout,
    embed_tokens,
    guided,
    losses_with_prefix,
    next_token_losses,
    prefix_shape,
    resnet,
    transformer,
    unmask,
    unmasking_noise,
)

__all__ = [
    "ConditioningDropout", "Projection", "TopK", "class_counts", "class_scores", "distill_loss", "embed_tokens",
    "fixation_counts", "fixation_density", "guided", "linear_cross_entropy", "losses_with_prefix", "match_features",
    "next_token_losses", "prefix_shape", "resnet", "saliency_metrics", "similarity_correlation", "top_k", "transformer",
    "unmask", "unmasking_noise",
]  # fmt: skip
