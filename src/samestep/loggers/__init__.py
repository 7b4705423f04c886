"""Where finished records go: the console, the text log, metrics.jsonl, TensorBoard and the summary."""
