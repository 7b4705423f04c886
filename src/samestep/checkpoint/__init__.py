"""What survives: checkpoints that load on any number of ranks, and no kill can spoil."""
