"""This process and its machine: environment variables, torchrun, SLURM, hardware and network."""
