"""Explain a hang: what each rank waits for, who holds up whom and where, for any script that `samestep run` starts."""
