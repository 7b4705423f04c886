"""A model among its ranks: wrapped, watched, computed in the right precision."""
