"""Frozen models that teach: one copy, in the right place."""
