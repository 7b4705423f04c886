"""Checkpoints that load on any world size and survive a kill at any moment."""
