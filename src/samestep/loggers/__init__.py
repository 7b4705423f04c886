"""Loggers of a run: console, text log, metrics.jsonl and TensorBoard."""
