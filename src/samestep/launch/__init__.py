"""Start the ranks of a job on this node or on SLURM, watch them, and report failures."""
