"""Weights and texts that ship inside packages, so that recipes run without a download."""

from samestep.assets.minilm import minilm
from samestep.assets.shakespeare import sentences
from samestep.assets.smollm2 import smollm2

__all__ = ["minilm", "sentences", "smollm2"]
