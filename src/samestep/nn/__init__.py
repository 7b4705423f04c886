"""Modules and losses that keep the laws: what they do to a sample does not depend on the ranks it is spread over."""

from samestep.nn.conditioning import ConditioningDropout
from samestep.nn.distill import Projection, TopK, distill_loss, match_features, top_k
from samestep.nn.guidance import guided

__all__ = ["ConditioningDropout", "Projection", "TopK", "distill_loss", "guided", "match_features", "top_k"]
