"""Estimate the memory and step time of a model on a cluster, and choose how to train it."""
