"""Read scripts of distributed training and name their faults; nothing is run, and torch is not imported."""
