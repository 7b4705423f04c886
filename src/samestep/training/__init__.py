"""The training process: the run, its ranks acting together, its data and its steps."""
